"""The sampler records the experts that it chooses, each at its token, and the trainer that uses the record computes the sampler's log-probabilities. Two further values
of each token go the same way, without a line in the library that names them.

In float32, the trainer's own choices are the sampler's, so a record at another token would show as flipped choices.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.rollouts import Continuation
from dapo_jax.dapo.tokens import VALUES, Tokens, TokenValue, join
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.experts import Experts, choices
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.rollout.checkpoint_arrays import drawn_arrays, drawn_of, flight_arrays, flight_of
from dapo_jax.rollout.collector import Collector
from dapo_jax.rollout.virtual_clock import ClockSizes, VirtualClock
from dapo_jax.sampling.continuous_batching import limits_of
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.interface import ResultTokens
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.round_sampler import RoundSampler
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater
from tests.sampling.continuous_batching_test import (
    EOS,
    GROUP,
    KEY,
    LIMIT,
    MAX_PROMPT,
    all_of,
    examples_of,
    one_device,
    prompts,
    sample,
    weights_of,
)
from tests.sampling.turns_test import Appending, new_context, two_more

UNRECORDED = 255
"""The largest number of a byte, where a record has no experts."""
LAYERS, CHOSEN = 2, 3
RECORDED = (("routes", (LAYERS, CHOSEN), "uint8"), ("doubled", (), "float32"), ("total", (LAYERS,), "int16"))
CONFIG = tiny_decoder_config(
    layers=LAYERS, mlps=(Experts(count=8, chosen=CHOSEN, normalize=True),), mlp_dim=16, qk_norm="head"
)


FURTHER = {
    "doubled": TokenValue(dtypes=("float32",), blank=1.0),
    "total": TokenValue(dtypes=("int16",), blank=-1, processed=True),
}
"""Twice the log-probability of a sampled token, and the sum of the numbers of a token's experts in each layer."""


@pytest.fixture(autouse=True)
def further_values(monkeypatch):
    for name, value in FURTHER.items():
        monkeypatch.setitem(VALUES, name, value)


def total_of(routes):
    return np.where(routes[..., 0] == UNRECORDED, -1, routes.astype(np.int16).sum(-1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FurtherResults(ResultTokens):
    doubled: Any
    total: Any


class FurtherEngine(DecoderEngine):
    """An engine that records the further values."""

    def prefill(self, *prompts, **how):
        for finished in super().prefill(*prompts, **how):
            for _, prefix, _ in finished:
                object.__setattr__(prefix, "total", [total_of(routes) for routes in prefix.routes])
            yield finished

    def generate(self, *given, **how):
        state, result = super().generate(*given, **how)
        doubled, total = 2 * np.asarray(result.logprobs), total_of(np.asarray(result.routes))
        return state, FurtherResults(**vars(result), doubled=doubled, total=total)


def assert_further(record, sampled=slice(None)):
    """Each further value is at the token of the value from which it was computed, and blank at all other tokens."""
    doubled = np.full(len(record), 1.0, np.float32)
    doubled[sampled] = 2 * record.logprobs[sampled]
    np.testing.assert_array_equal(record.arrays["doubled"], doubled)
    np.testing.assert_array_equal(record.arrays["total"], total_of(record.routes))


@functools.cache
def engine_of(slots, steps=8, **how):
    return FurtherEngine(
        CONFIG,
        one_device(),
        EngineSpec(
            slots=slots,
            capacity=MAX_PROMPT + LIMIT,
            steps_per_call=steps,
            stop_ids=[EOS],
            records_routes=True,
            has_turns=True,
            **how,
        ),
    )


def sampled_by(engine, *ordinals, **how):
    return sample(engine, prompts(*ordinals), weights=weights_of(config=CONFIG), **how)


@functools.cache
def updater_of(replays=True, mesh=None, **how):
    how = {"remat": "dots", "layout": layout_of(mesh or one_device())} | how
    graph = graph_of(CONFIG, **how)
    options = UpdateOptions(
        logprob_chunk_vocab=100,
        old_logprobs="trainer",
        recorded=RECORDED if replays else (),
    )
    return Updater(graph, shapes_of(CONFIG), make_optimizer(), mesh or one_device(), options=options)


def trained(rows, **how):
    """(sampler's minus trainer's log-probabilities of a scoring pass, metrics of an update) of packed rows."""
    differences, updater, state, second = scored(rows, **how)
    _, metrics = updater.update(state, (second,), learning_rate=0.0, first=True)
    return differences, to_scalars(metrics)


def scored(rows, *, seed=0, mesh=None, **how):
    """(sampler's minus trainer's log-probabilities, the updater, its state, and the scored minibatch) of packed rows."""
    updater = updater_of(replays=rows[0].response.routes is not None, mesh=mesh, **how)
    params = tiny_params(CONFIG, seed=seed)
    params = params if mesh is None else jax.device_put(params, shardings(params, mesh))
    state = init_state(params, make_optimizer(), mesh or one_device())
    packed = pack(rows, np.ones(len(rows)), row_tokens=40, rows_per_microbatch=24, spread=2 if mesh else 1)
    for m in packed if "total" in packed[0].recorded else ():
        np.testing.assert_array_equal(m.recorded["total"], total_of(m.recorded["routes"]))
        np.testing.assert_array_equal(m.recorded["doubled"][m.mask], 2 * m.sampler_logprobs[m.mask])
        assert (m.recorded["doubled"][~m.mask & (m.sampler_logprobs == 0)] == 1.0).all()
    _, [second] = updater.prepare(state, [packed, packed])
    m = jax.device_get(second.microbatches)
    return (m.sampler_logprobs - m.old_logprobs)[m.mask], updater, state, second


def assert_recorded(sampled, *, ends=True):
    """Each token has three different experts in each layer. The last token of a response has no record."""
    for response in all_of(sampled):
        routes = response.record.routes
        assert routes.dtype == np.uint8
        assert routes.shape == (len(response.tokens), LAYERS, CHOSEN)
        assert (routes[-1] == UNRECORDED).all()
        assert_further(response.record, response.sampled)
        known = (
            routes[:-1]
            if not response.prompt_values
            else np.concatenate([response.prompt_values["routes"], routes[:-1]])
        )
        if ends:
            assert (known < 8).all()
            assert all(len(set(each)) == CHOSEN for each in known.reshape(-1, CHOSEN).tolist())


def assert_the_trainers(sampled, **how):
    differences, metrics = trained(examples_of(sampled), **how)
    assert np.abs(differences).max() <= 2e-5
    assert metrics["routing/flipped_frac"] == 0.0
    assert metrics["sync/logprob_diff_max"] <= 2e-5
    return metrics


NARROW = PrefillShape(rows=1, width=4, longest=MAX_PROMPT)


@pytest.mark.parametrize(
    "how",
    [
        {},
        # Slow: compile further samplers. Preempted responses with records are in tests/sampling/heads_test.py. tests/models/experts_test.py shows that no bit depends on other tokens.
        pytest.param({"page_tokens": 4, "cache_tokens": 48, "prefill": NARROW}, marks=pytest.mark.slow),
        pytest.param({"batch_invariant": True}, marks=pytest.mark.slow),
    ],
    ids=["slots", "chunks and preempted", "batch invariant"],
)
def test_records_are_the_trainers_choices(how):
    """Groups share a prefill. With 48 cached tokens in pages of 4, responses are preempted; prompts of up to 8 tokens take two chunks."""
    sampled = sampled_by(engine_of(8, **how), 0, 1, 2, 3, 4)
    assert_recorded(sampled)
    metrics = assert_the_trainers(sampled)
    # Six responses to a prompt share its tokens in a row, and the last token of each has no record.
    tokens = [len(prompt.tokens) for prompt in prompts(0, 1, 2, 3, 4)]
    total = sum(tokens) + sum(len(response.tokens) for response in all_of(sampled))
    assert metrics["routing/no_record_frac"] == pytest.approx(30 / total, abs=0.02)
    assert metrics["routing/busiest_load"] >= 1.0
    assert 0.0 <= metrics["routing/unused_frac"] < 1.0


# Slow: two more engines. tests/sampling/heads_test.py has records of preempted responses.
@pytest.mark.slow
def test_slots_and_preemption_change_no_record():
    one, other = (
        sampled_by(engine_of(8, **how), 0, 1, 2, 3, 4)
        for how in ({}, {"page_tokens": 4, "cache_tokens": 48, "prefill": NARROW})
    )
    for ordinal, responses in one.items():
        for a, b in zip(responses, other[ordinal], strict=True):
            assert a.record.routes.tolist() == b.record.routes.tolist()
            np.testing.assert_equal(a.prompt_values, b.prompt_values)


@pytest.mark.parametrize("answer", [two_more, new_context], ids=["appended", "new contexts"])
# Slow if each turn is prefilled: compiles another sampler. tests/sampling/turns_test.py compares both ways.
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="fed"),
        pytest.param({"batch_invariant": True}, id="prefilled again", marks=pytest.mark.slow),
    ],
)
def test_tokens_of_environments_and_the_last_tokens_of_turns_have_records(answer, how):
    engine = engine_of(8, **how)
    sampled = sampled_by(engine, 0, 1, 2, environments=Appending(answer, turn_tokens=3))
    assert_recorded(sampled, ends=answer is two_more)
    metrics = assert_the_trainers(sampled)
    examples = examples_of(sampled)
    for one in examples:
        assert (one.response.routes[:-1] < 8).all(), "only the last token of a context has no record"
    assert metrics["routing/no_record_frac"] > 0


def altered(row, seed=0):
    """Other experts in the place of the recorded ones, for a quarter of all response tokens and layers."""
    rng, routes = np.random.default_rng(seed), row.response.routes
    others = np.stack([rng.permutation(8)[:CHOSEN] for _ in range(routes[..., 0].size)]).reshape(routes.shape)
    change = (rng.random(routes.shape[:2]) < 0.25)[..., None] & (routes != UNRECORDED)
    routes = np.where(change, others, routes)
    values = {**row.response.arrays, "routes": routes, "total": total_of(routes)}
    return replace(row, response=Tokens(**values))


# Slow: compile other updates.
@pytest.mark.parametrize(
    "how", [{}, *(pytest.param({"remat": remat}, marks=pytest.mark.slow) for remat in ("none", "full"))]
)
def test_altered_records_are_used_in_scoring_and_in_the_update(how):
    """As a direct call of the decoder for each response alone does, to 2e-5."""
    sampled = sampled_by(engine_of(8), 0, 1, 2, 3, 4)
    rows = [altered(one, at) for at, one in enumerate(examples_of(sampled))]
    differences, metrics = trained(rows, **how)
    assert np.abs(differences).max() > 0.01
    assert metrics["sync/logprob_diff_max"] == pytest.approx(np.abs(differences).max(), abs=2e-5)
    assert 0.1 < metrics["routing/flipped_frac"] < 0.3
    params = tiny_params(CONFIG)
    decoder = nnx.merge(graph_of(CONFIG), params)
    expected = []
    call = jax.jit(lambda *arrays: decoder.ends.logits(decoder(*arrays)[0]))
    for one in rows:
        whole = join([one.prompt, one.response])
        tokens, positions = np.zeros((1, 24), np.int32), np.arange(24, dtype=np.int32)[None]
        routes = np.full((1, 24, LAYERS, CHOSEN), UNRECORDED, np.uint8)
        tokens[0, : len(whole)], routes[0, : len(whole)] = whole.ids, whole.routes
        segments = (positions < len(whole)).astype(np.int32)
        logprobs = jax.nn.log_softmax(call(tokens, positions, segments, segments, choices(routes)))[0]
        places = np.arange(len(one.prompt), len(whole))
        expected.append(one.response.logprobs - np.asarray(logprobs)[places - 1, whole.ids[places]])
    np.testing.assert_allclose(np.sort(differences), np.sort(np.concatenate(expected)), rtol=0, atol=2e-5)


# Slow: compiles an update for eight devices. The test above has altered records on one device; tests/models/experts_test.py has eight devices.
@pytest.mark.slow
def test_a_mesh_uses_the_same_records():
    """Two rows at a time, each split over context, with the experts over fsdp and each expert over tensor: as one device, and the same metrics."""
    rows = [altered(one, at) for at, one in enumerate(examples_of(sampled_by(engine_of(8), 0, 1, 2, 3, 4)))]
    mesh = make_mesh(data=1, fsdp=2, tensor=2, context=2)
    (found, measured), (expected, like) = trained(rows, mesh=mesh), trained(rows)
    np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=0, atol=2e-5)
    for name in (name for name in like if name.startswith("routing/")):
        assert measured[name] == pytest.approx(like[name], abs=1e-6), name


def rounds_of(seed, **how):
    engine = engine_of(4, 4, in_flight=12, page_tokens=4)
    return RoundSampler(
        engine, weights_of(seed, CONFIG), key=KEY, decoding=decoding(), max_response_tokens=LIMIT, **how
    )


def test_responses_in_flight_keep_their_records_when_the_weights_change():
    """Tokens that older weights processed keep their experts, in the sampler and in the trainer. So both compute the same log-probabilities with the new weights."""
    asked = prompts(1, 2)
    going = [Request(prompt, index, 0) for prompt in asked for index in range(GROUP)]
    rounds_of(0).draw(going, 5)
    before = [request.record.copy().routes for request in going]
    going = [request.rest() for request in going if request.drawn == 5]
    for request in going:
        request.version = 1
    rounds_of(1).draw(going, 6)
    assert len(going) > 6
    rows, kept = [], [each for each in before if len(each) == 5][: len(going)]
    for request, old in zip(going, kept, strict=True):
        np.testing.assert_array_equal(request.record.routes[:4], old[:4])
        rows.append(
            Example(
                prompt=Tokens(request.prompt.tokens, **request.prompt_values),
                response=request.record,
                sampled=np.arange(request.drawn) >= 5,
            )
        )
    differences, metrics = trained(rows, seed=1)
    assert np.abs(differences).max() <= 2e-5
    assert metrics["routing/flipped_frac"] > 0.05, "new weights choose other experts"
    free = [replace(row, prompt=row.prompt.sampled, response=row.response.sampled) for row in rows]
    assert np.abs(scored(free, seed=1)[0]).max() > 1e-3


def test_other_processes_get_the_records_of_a_round():
    """What `Drawn` hands over, in arrays, is the record of the sampling process, with tokens that environments appended, and after new contexts."""
    sizes = ClockSizes(in_flight=12, samples_per_prompt=GROUP, needed=2, answer_rounds=0)
    environments = Appending(new_context, turn_tokens=3)
    limits = limits_of(environments, max_response_tokens=LIMIT, capacity=MAX_PROMPT + LIMIT)
    asked = {prompt.ordinal: prompt for prompt in prompts(0, 1, 2)}
    here, there = (
        Collector(clock=VirtualClock(sizes), ready={}, prompt_at=asked.__getitem__, limits=limits)
        for _ in range(2)
    )
    sampler = rounds_of(0, limits=limits)
    for collector in (here, there):
        collector.start()
    seen = {one: [] for one in here.responses}

    def answer():
        for collector in (here, there):
            for one in collector.answers_due():
                request = collector.responses[one]
                before = new_context(one.ordinal, one.index, request.turns)
                found = Continuation(np.array(before, np.int32)) if isinstance(before, list) else before
                collector.answer(one, found, request.standing)

    answer()
    for _ in range(5):
        names = [one for one in here.responses if here.draws(one)]
        drawn = sampler.draw([here.responses[one] for one in names], 2)
        sent = drawn_of({name: array.copy() for name, array in drawn_arrays(drawn).items()})
        here.take(dict(zip(names, drawn, strict=True)), set(names))
        there.take(dict(zip(names, sent, strict=True)), set())
        answer()
        for one, request in here.responses.items():
            other = there.responses[one]
            np.testing.assert_equal(other.record.arrays, request.record.arrays)
            np.testing.assert_equal(other.prompt_values, request.prompt_values)
            assert_further(request.record, request.record.logprobs != 0)
            seen[one].append(request.record.settled)
        for collector in (here, there):
            collector.end_round()
    # A checkpoint between two steps has the same records.
    restored = flight_of(flight_arrays(here.going_on()), asked.__getitem__)
    for one, request in restored.responses.items():
        np.testing.assert_equal(request.record.arrays, here.responses[one].record.arrays)
        np.testing.assert_equal(request.prompt_values, here.responses[one].prompt_values)
    assert all(counts[-1] > counts[0] for counts in seen.values())
