"""Requests that differ, that are taken back, and weights that change on the way: with an engine without a model, and with a decoder."""

import functools
import itertools
from functools import partial

import jax
import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.decode_loop import DecodeLoop
from dapo_jax.sampling.decoding import DecodingOptions, decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.requests import OwnOptions, Request
from dapo_jax.testing import ScriptedEngine, tiny_decoder_config, tiny_params
from tests.sampling.continuous_batching_schedule_test import PrefillsSlowly

EOS, LIMIT = 1, 16


def request(ordinal, *, index=0, options=None, tokens=None):
    prompt = Prompt(
        ordinal=ordinal, tokens=np.array(tokens or (ordinal + 2,) * 4, np.int32), text="", answer=""
    )
    return Request(prompt, index, LIMIT, options=options)


def loop_of(engine, asked, params=None, **options):
    left = iter(asked)
    return DecodeLoop(
        engine, {} if params is None else params, key=jax.random.key(0), decoding=decoding(), stop=None, refill_frac=0.1, on_look=lambda: None,
        more=lambda: list(itertools.islice(left, 2)), **options,
    )  # fmt: skip


def run(loop, at=lambda call: None, *, least_calls=0):
    """{id of a request: its tokens}; `at` is called with the number of each call before it."""
    found, call, ended = {}, 0, []
    while ended is not None or call < least_calls:
        at(call)
        ended, call = loop.step(), call + 1
        found.update({id(each): each.record.ids.tolist() for each, _ in ended or ()})
    return found


def scripted(slots=4, *, length=10, pool_pages=None):
    """Every response is its ordinal, ten times."""
    sizes = pool_pages and PageSizes(
        holders=slots, capacity=24, page_tokens=4, pools=1, pool_pages=pool_pages
    )
    return ScriptedEngine(
        lambda ordinal, index: [ordinal + 20] * (length - 1) + [EOS], slots=slots, capacity=24, steps_per_call=2, page_sizes=sizes
    )  # fmt: skip


@pytest.mark.parametrize("pool_pages", [None, 8])
@pytest.mark.parametrize("when", range(7))
def test_requests_that_are_dropped_leave_their_places_to_others(when, pool_pages):
    """In slots, in line with or without pages, or in prefill: half of the requests are dropped, and the others have their responses."""
    engine = scripted(slots=2, pool_pages=pool_pages)
    asked = [request(ordinal) for ordinal in range(8)]
    loop = loop_of(engine, [[each] for each in asked])
    gone = asked[::2]
    found = run(loop, at=lambda call: loop.drop(gone) if call == when else None, least_calls=9)
    assert {id(each) for each in asked[1::2]} <= found.keys()
    assert all(
        found[id(each)] == [each.prompt.ordinal + 20] * 9 + [EOS] for each in asked if id(each) in found
    )
    assert loop.slots.live == 0
    pages = loop.slots.pages
    assert (
        sum(pages.free(pool) for pool in range(pages.sizes.pools))
        == pages.sizes.pools * pages.sizes.pool_pages
    )
    drawn_for = len(engine.inserted)
    assert drawn_for <= 8
    if when == 0:
        assert {ordinal for ordinal, _ in engine.inserted} == {1, 3, 5, 7}


@pytest.mark.parametrize("pool_pages", [None, 9])
@pytest.mark.parametrize("when", range(1, 9))
def test_other_weights_lose_no_response_and_sample_no_token_twice(when, pool_pages):
    engine = scripted(slots=3, pool_pages=pool_pages)
    asked = [[request(ordinal, index=index) for index in range(2)] for ordinal in range(5)]
    loop = loop_of(engine, asked)

    def change(call):
        if call in (when, when + 1):
            loop.take({})
            assert all(each.prefix is None for each in loop.waiting), "prefilled with the old weights"

    found = run(loop, at=change, least_calls=11)
    assert len(found) == 10
    for each in itertools.chain.from_iterable(asked):
        assert found[id(each)] == [each.prompt.ordinal + 20] * 9 + [EOS]
    pages = loop.slots.pages
    assert pages.free(0) == pages.sizes.pool_pages
    read_again = [len(prompt) for prompts in engine.prefills for prompt in prompts if len(prompt) > 4]
    assert read_again, "nothing was re-prefilled"


def test_running_responses_stream_on_while_other_prompts_are_prefilled():
    """Without `prefill_first`, a call samples one token after each prefill until the slots are taken; then all that it may."""
    engine = PrefillsSlowly(
        lambda o, i: [o + 20] * 9 + [EOS], slots=4, capacity=24, steps_per_call=3, stop_ids=[EOS]
    )
    loop = loop_of(engine, [[request(at, tokens=(2,) * 6)] for at in range(4)], prefill_first=False)
    run(loop)
    calls = "".join("p" if each == "prefill" else each[0] for each in engine.order)
    # Four prompts of three parts. The end of one prompt and the first part of the next come together.
    assert calls == "ppp1p1p1pp1p1p1p1p1p3331"


CONFIG = tiny_decoder_config(layers=1)
MESH = make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def weights():
    return WeightTransfer(shapes_of(CONFIG), MESH, dtype="float32")(tiny_params(CONFIG))


@functools.cache
def decoder_engine(slots, **how):
    return DecoderEngine(
        CONFIG, MESH, EngineSpec(slots=slots, capacity=24, steps_per_call=4, stop_ids=[EOS], **how)
    )


def with_seed(seed, *, at=None, **options):
    return OwnOptions(decoding=DecodingOptions(**options), key=jax.random.key(seed), stop=at)


@pytest.mark.parametrize("how", [{}, {"batch_invariant": True}], ids=["", "batch_invariant"])
def test_requests_are_sampled_with_their_own_options_and_keys(how, weights):
    """A request with a key of its own has the same response in any slot, next to any others. The other responses depend on their ordinals."""

    def sampled(asked):
        engine = decoder_engine(8, **how)
        loop = loop_of(engine, [[each] for each in asked], params=weights)
        found = run(loop)
        return [(found[id(each)], each.record.logprobs.tobytes()) for each in asked]

    tokens = (3, 4, 5)
    own = partial(request, tokens=tokens, options=with_seed(5, temperature=0.9))
    others = [
        request(ordinal, options=OwnOptions(decoding=DecodingOptions(temperature=0.3 * ordinal, top_p=0.8)))
        for ordinal in range(4, 9)
    ]
    alone, among = sampled([own(0)])[0], sampled([*others, own(77)])[-1]
    assert among[0] == alone[0]
    if how:
        assert among == alone
    [(another, _)] = sampled([request(0, tokens=tokens, options=with_seed(6, temperature=0.9))])
    assert another != alone[0]
    by_ordinal = [
        sampled([request(at, tokens=tokens, options=OwnOptions(decoding=DecodingOptions()))])[0][0]
        for at in (1, 2)
    ]
    assert by_ordinal[0] != by_ordinal[1]
    greedy = [
        sampled([request(at, tokens=tokens, options=with_seed(at, temperature=0.0))])[0][0] for at in (1, 2)
    ]
    assert greedy[0] == greedy[1]


def test_a_request_is_stopped_by_its_own_rule(weights):
    def after(count):
        return lambda tokens, seen: count if len(tokens) >= count else None

    asked = [request(0, tokens=(3, 4, 5), options=with_seed(2, at=at)) for at in (None, after(2), after(5))]
    loop = loop_of(decoder_engine(8), [[each] for each in asked], params=weights)
    found = run(loop)
    whole, *cut = (found[id(each)] for each in asked)
    assert len(whole) > 5
    assert cut == [whole[:2], whole[:5]]
