"""The sampler over a real decoder: its log-probabilities are the trainer's, its responses depend on nothing but their names.

All engines here compute the same decoder, so responses are compared across slots, steps, order, neighbours and devices.
"""

import functools
import itertools
import logging
import re
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.presets import Experts
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh, make_meshes
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.rollout.response_sampler import EVALUATION, TRAINING
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater

CONFIG = tiny_decoder_config(qkv_bias=True, qk_norm="head", tied_embeddings=False)
EOS, MAX_PROMPT, LIMIT, GROUP = 1, 8, 16, 6
KEY = jax.random.key(10)
PROGRAMS = [
    "_embed_program", "_generate_program", "_head_program", "_init_program", "_insert_program", "_layer_program",
]  # fmt: skip


@functools.cache
def one_device():
    return make_mesh(devices=jax.devices()[:1])


def made(slots, steps=8, *, mesh=None, config=CONFIG, **how):
    return DecoderEngine(
        config,
        mesh or one_device(),
        EngineSpec(slots=slots, capacity=MAX_PROMPT + LIMIT, steps_per_call=steps, stop_ids=[EOS], **how),
    )


engine_of = functools.cache(made)


@functools.cache
def weights_of(seed=0, config=CONFIG):
    return transfer_of(config)(tiny_params(config, seed=seed))


@functools.cache
def transfer_of(config):
    return WeightTransfer(shapes_of(config), one_device(), dtype="float32", places=config.places)


def prompts(*ordinals):
    """The prompt of an ordinal is always the same, 1 to 8 tokens long."""
    return [
        Prompt(
            ordinal=ordinal,
            tokens=np.random.default_rng(ordinal).integers(2, 20, 1 + ordinal * 3 % MAX_PROMPT).astype(np.int32),
            text="",
            answer="",
        )
        for ordinal in ordinals
    ]  # fmt: skip


def sample(
    engine, asked, *, key=KEY, temperature=1.0, samples=GROUP, limit=LIMIT, weights=None, at_once=4, **how
):
    """{ordinal: responses}; `at_once` is how many prompts the source hands over when asked."""
    left = iter(asked)
    sampled = Sampler(engine, prefill_prompts=4).sample(
        weights_of() if weights is None else weights,
        lambda count: list(itertools.islice(left, min(count, at_once))),
        key=key,
        decoding=decoding(temperature=temperature),
        samples_per_prompt=samples,
        max_response_tokens=limit,
        **how,
    )
    return {prompt.ordinal: responses for prompt, responses in sampled}


@functools.cache
def baseline():
    """Five groups of six through four slots, up to eight tokens a call."""
    return sample(engine_of(4, 8), prompts(0, 1, 2, 3, 4))


def assert_same(found, expected, *, logprob_tolerance=1e-5):
    assert found.keys() == expected.keys()
    for ordinal, responses in expected.items():
        for got, want in zip(found[ordinal], responses, strict=True):
            np.testing.assert_array_equal(got.tokens, want.tokens)
            np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=logprob_tolerance)
            assert got.finish_reason == want.finish_reason


def all_of(sampled):
    return [response for responses in sampled.values() for response in responses]


def examples_of(sampled):
    """{ordinal: responses} as the trainer gets them, by `training_examples` without groups."""
    asked = {prompt.ordinal: prompt.tokens for prompt in prompts(*sampled)}
    return [
        Example(
            prompt=context, response=response.record.cut(first, stop), sampled=response.sampled[first:stop]
        )
        for ordinal, responses in sampled.items()
        for response in responses
        for context, first, stop in response.parts(asked[ordinal])
    ]


def differences(sampled, temperature=1.0, config=CONFIG):
    """The sampler's log-probabilities minus the trainer's, for all sampled tokens. The trainer has the rows packed, padded and in chunks."""
    rows, graph = examples_of(sampled), graph_of(config, remat="dots")
    options = UpdateOptions(temperature=temperature, logprob_chunk_vocab=100)
    updater = Updater(graph, shapes_of(config), make_optimizer(), one_device(), options=options)
    state = init_state(tiny_params(config), make_optimizer(), one_device())
    packed = pack(rows, np.ones(len(rows)), row_tokens=40, rows_per_microbatch=24)
    [second] = updater.prepare(state, [packed, packed])[
        1
    ]  # the trainer scores the second minibatch of a step
    m = jax.device_get(second.microbatches)
    assert m.mask.sum() == sum(response.sampled_tokens for response in all_of(sampled))
    return (m.sampler_logprobs - m.old_logprobs)[m.mask]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_trainers_end_token_included(temperature):
    """To 2e-5 in float32."""
    sampled = sample(engine_of(4, 8), prompts(0, 1, 2, 3, 4), temperature=temperature)
    assert np.abs(differences(sampled, temperature)).max() <= 2e-5
    assert any(response.tokens[-1] == EOS for response in all_of(sampled))


@pytest.mark.parametrize(("slots", "steps"), [(16, 8), (4, 1)])
def test_slots_and_steps_per_call_change_no_response(slots, steps):
    assert_same(sample(engine_of(slots, steps), prompts(0, 1, 2, 3, 4)), baseline())


@functools.cache
def invariant(slots, steps, devices=1, config=CONFIG):
    mesh = make_mesh(devices=jax.devices()[:devices])
    engine = made(slots, steps, mesh=mesh, config=config, batch_invariant=True)
    transfer = WeightTransfer(shapes_of(config), mesh, dtype="float32", places=config.places)
    return engine, transfer(tiny_params(config))


@functools.cache
def invariant_baseline(config=CONFIG):
    engine, weights = invariant(8, 8, config=config)
    return sample(engine, prompts(0, 1, 2, 3, 4), weights=weights)


def test_batch_invariant_sampling_gives_the_same_responses():
    assert_same(invariant_baseline(), baseline())


@pytest.mark.parametrize(
    ("slots", "steps", "devices", "order", "at_once"),
    [
        (16, 8, 2, [3, 1, 4, 0, 2], 4),
        # Slow: a sampler each. The case above changes slots, devices and the order.
        pytest.param(24, 3, 1, [4, 2, 0, 3, 1], 1, marks=pytest.mark.slow),
        pytest.param(16, 8, 1, [0, 1, 2, 3, 4], 4, marks=pytest.mark.slow),
        pytest.param(64, 1, 1, [0, 1, 2, 3, 4], 2, marks=pytest.mark.slow),
        pytest.param(64, 5, 4, [0, 1, 2, 3, 4], 1, marks=pytest.mark.slow),
    ],
)
def test_batch_invariant_sampling_changes_no_bit(slots, steps, devices, order, at_once):
    """Any slots, tokens a call, devices that share the slots, order of prompts, and number of prompts in a prefill."""
    engine, weights = invariant(slots, steps, devices)
    found = sample(engine, prompts(*order), weights=weights, at_once=at_once)
    assert_same(found, invariant_baseline(), logprob_tolerance=0)


# Slow: compiles two samplers. tests/models/experts_test.py shows that no bit of a result depends on other tokens.
@pytest.mark.slow
def test_batch_invariant_sampling_with_experts_changes_no_bit():
    """Tokens are sorted by expert, so a token's row depends on other responses, but its result does not."""
    config = tiny_decoder_config(mlps=(Experts(8, 2, normalize=True),), mlp_dim=16)
    engine, weights = invariant(16, 8, 2, config)
    found = sample(engine, prompts(3, 1, 4, 0, 2), weights=weights, at_once=4)
    assert_same(found, invariant_baseline(config), logprob_tolerance=0)


# Slow: compiles two samplers. tests/models/recurrent_test.py shows that no bit of a segment depends on other segments.
@pytest.mark.slow
def test_batch_invariant_sampling_with_recurrent_states_changes_no_bit():
    """States of slots are cut into blocks like all arrays over slots."""
    config = tiny_decoder_config(layers=2, mixers=(GatedDelta(2, 4, 8, 8), ATTENTION))
    engine, weights = invariant(16, 8, 2, config)
    found = sample(engine, prompts(3, 1, 4, 0, 2), weights=weights, at_once=4)
    assert_same(found, invariant_baseline(config), logprob_tolerance=0)


# Slow: compiles another sampler.
@pytest.mark.slow
def test_other_slots_change_bits_unless_sampling_is_batch_invariant():
    """Or the test above would show nothing."""
    few, many = (all_of(sample(engine_of(slots, 8), prompts(0, 1, 2, 3, 4))) for slots in (8, 64))
    assert any((a.logprobs != b.logprobs).any() for a, b in zip(few, many, strict=True))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"slots": 12}, r"slots=12 must be a multiple of 8 x .* = 8 with sampling\.batch_invariant=true, .* 16$"),
        ({"slots": 8, "cache_tokens": 100, "page_tokens": 4}, r"needs a cache that holds every response to its end, .*cache_tokens.*25 pages of 4"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_batch_invariant_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        made(batch_invariant=True, **how)


@pytest.mark.parametrize(
    ("slots", "steps", "cache"),
    [
        # Slow: a sampler each. The last case has pages of four tokens, preemption and prompts in parts.
        pytest.param(16, 8, {"page_tokens": 1, "cache_tokens": 40}, marks=pytest.mark.slow),
        pytest.param(4, 8, {"page_tokens": 7, "cache_tokens": 28}, marks=pytest.mark.slow),
        pytest.param(4, 8, {"page_tokens": 4}, marks=pytest.mark.slow),
        (16, 3, {"page_tokens": 4, "cache_tokens": 48, "prefill": PrefillShape(rows=2, width=5, longest=MAX_PROMPT)}),
        *(
            pytest.param(16, steps, {"page_tokens": page, "cache_tokens": tokens}, marks=pytest.mark.slow)
            for steps, page, tokens in ((1, 5, 50), (3, 4, 96), (8, 24, 24))
        ),
    ],
)  # fmt: skip
def test_pages_change_no_response(slots, steps, cache):
    """Down to a pool that holds one sequence alone: responses are preempted again and again, and re-prefilled, also in parts of 5 tokens."""
    engine = engine_of(slots, steps, **cache)
    assert_same(sample(engine, prompts(0, 1, 2, 3, 4)), baseline())
    assert_same(sample(engine, prompts(4, 2, 0, 3, 1), at_once=2), baseline())


def test_a_response_does_not_depend_on_the_group_size():
    for ordinal, responses in sample(engine_of(4, 8), prompts(0, 1), samples=2).items():
        assert_same({ordinal: responses}, {ordinal: baseline()[ordinal][:2]})


# Slow: compiles another sampler. A pool with fewer pages has the same cache.
@pytest.mark.parametrize(
    "cache",
    [{}, {"page_tokens": 4, "cache_tokens": 96}, pytest.param({"page_tokens": 4}, marks=pytest.mark.slow)],
    ids=str,
)
def test_nothing_of_a_slots_previous_owner_reaches_the_next(cache, monkeypatch):
    """Neither NaN in all free pages and slots nor a long response before a short prompt: not a bit of any response changes."""
    engine = engine_of(4, 8, **cache)
    clean, state = sample(engine, prompts(0, 1, 2, 3, 4)), engine.init_decode_state()
    # Prompt 0 has one token; prompts 2 and 5 have seven and eight, and their responses were there before it.
    lone, later = (sample(engine, prompts(*order), at_once=1)[0] for order in ([0], [2, 5, 0]))
    assert_same({0: later}, {0: lone}, logprob_tolerance=0)
    layers, logits = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), (state.layers, state.logits))
    poisoned = replace(state, layers=layers, logits=logits, lengths=state.lengths + engine.capacity - 1)
    monkeypatch.setattr(engine, "init_decode_state", lambda: poisoned)
    assert_same(sample(engine, prompts(0, 1, 2, 3, 4)), clean, logprob_tolerance=0)


@contextmanager
def compiled_programs(caplog):
    """The names of the engine's programs and of the transfer, as often as XLA compiles them inside the block."""
    names = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield names
        found = (re.match(r"Compiling jit\((\w+)\)", record.getMessage()) for record in caplog.records)
        names += [match[1] for match in found if match and match[1].endswith(("_program", "transfer"))]


def test_new_weights_and_numbers_compile_nothing(caplog):
    engine = made(4)
    weights_of(seed=0)
    with compiled_programs(caplog) as compiled:
        first = sample(engine, prompts(0, 1, 2))
    assert sorted(compiled) == PROGRAMS
    with compiled_programs(caplog) as compiled:
        second = sample(engine, prompts(0, 1, 2), weights=weights_of(seed=1))
        sample(engine, prompts(5, 6), samples=1, temperature=0.3)
        sample(
            engine,
            prompts(0, 1, 2, 3, 8, 9, 10, 11),
            samples=3,
            limit=5,
            weights=weights_of(seed=2),
            temperature=0.0,
        )
    assert compiled == []
    assert any(
        a.tokens.tolist() != b.tokens.tolist() for a, b in zip(all_of(first), all_of(second), strict=True)
    )


@pytest.mark.parametrize(
    ("how", "most"),
    # A cache in float8 keeps 3 bits after the leading one, int8 about 7 of the largest.
    [
        # Slow: compiles other samplers. tests/sampling/paged_cache_test.py attends to caches in eight bits.
        pytest.param({"cache_dtype": "int8"}, 0.02, marks=pytest.mark.slow),
        pytest.param({"cache_dtype": "float8_e4m3fn"}, 0.1, marks=pytest.mark.slow),
        ({"weights": "int8"}, 0.05),
    ],
    ids=str,
)
def test_eight_bits_sample_another_policy_by_little(how, most):
    """The recorded log-probabilities are the sampler's, with its rounded weights or cache: near the trainer's, and not equal."""
    how = dict(how)
    eight_bit = how.pop("weights", None) == "int8"
    weights = WeightTransfer(shapes_of(CONFIG), one_device(), dtype="float32", eight_bit=eight_bit)(
        tiny_params(CONFIG)
    )
    sampled = sample(engine_of(16, 8, **how), prompts(0, 1, 2, 3, 4), weights=weights)
    assert 1e-4 < np.abs(differences(sampled)).mean() < most


def test_responses_end_in_the_end_token_or_at_the_limit():
    responses = all_of(baseline())
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    for response in responses:
        assert len(response.logprobs) == len(response.tokens) <= LIMIT
        assert (response.logprobs < 0).all()
        assert EOS not in response.tokens[:-1]
        if response.finish_reason == "stop":
            assert response.tokens[-1] == EOS
        else:
            assert len(response.tokens) == LIMIT
            assert response.tokens[-1] != EOS


@pytest.mark.parametrize(("slots", "steps"), [(4, 8), (16, 8), (4, 1)])
def test_a_stop_function_cuts_a_response_wherever_a_call_ends(slots, steps):
    """The response without it, up to its second 8, in whatever portions the tokens came."""
    seen = []

    def stop(tokens, start):
        seen.append((len(tokens), start))
        places = np.flatnonzero(tokens == 8)
        return int(places[1]) + 1 if len(places) > 1 else None

    found = sample(engine_of(slots, steps), prompts(0, 1, 2, 3, 4), stop=stop)
    cuts = 0
    for ordinal, responses in baseline().items():
        for got, whole in zip(found[ordinal], responses, strict=True):
            length = stop(whole.tokens, 0) or len(whole.tokens)
            cuts += length < len(whole.tokens)
            assert got.tokens.tolist() == whole.tokens[:length].tolist()
            assert len(got.logprobs) == length
            assert got.finish_reason == ("stop" if stop(whole.tokens, 0) else whole.finish_reason)
    assert cuts > 3
    assert all(start < length for length, start in seen), "it is called once for each portion"


def test_the_responses_of_a_group_differ():
    for responses in baseline().values():
        assert len({tuple(response.tokens) for response in responses}) == GROUP


def test_a_question_asked_again_gets_other_responses():
    """Epochs repeat questions; the ordinal does not repeat."""
    (asked,) = prompts(3)
    again = sample(engine_of(4, 8), [replace(asked, ordinal=103)])[103]
    assert all(list(a.tokens) != list(b.tokens) for a, b in zip(again, baseline()[3], strict=True))


def test_another_seed_or_key_domain_gives_other_responses():
    """Evaluation must not use the random numbers of training."""
    assert TRAINING != EVALUATION
    groups = [
        sample(engine_of(4, 8), prompts(3), key=key)[3]
        for key in (jax.random.fold_in(KEY, TRAINING), jax.random.fold_in(KEY, EVALUATION), jax.random.key(8))
    ]
    first, *others = ({tuple(response.tokens) for response in group} for group in groups)
    assert all(len(first & other) < GROUP // 2 for other in others)


def test_at_temperature_0_all_responses_are_the_same():
    for responses in sample(engine_of(4, 8), prompts(0, 1), temperature=0.0).values():
        assert len({tuple(response.tokens) for response in responses}) == 1


@pytest.mark.parametrize(
    ("axes", "sampler_tensor", "slots"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4, 4),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, 0, 4, marks=pytest.mark.slow),
        pytest.param({"fsdp": 8}, 0, 8, marks=pytest.mark.slow),
        pytest.param({"fsdp": 4, "tensor": 2}, 1, 8, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tensor": 2, "context": 2}, 0, 4, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_of_eight_devices_samples_the_same(axes, sampler_tensor, slots, caplog):
    """For any layout of the trainer: slots and heads are spread, so sums over heads have another order. Four devices have a copy of one of two key heads each."""
    meshes = make_meshes(make_mesh(**axes), sampler_tensor=sampler_tensor)
    engine = made(slots, mesh=meshes.sampler)
    params = jax.device_put(tiny_params(CONFIG), shardings(shapes_of(CONFIG), meshes.train))
    weights = WeightTransfer(params, meshes, dtype="float32")(params)
    with compiled_programs(caplog) as compiled:
        found = sample(engine, prompts(0, 1, 2, 3, 4), weights=weights)
    assert_same(found, baseline())
    # Four prompts are prefilled, then one, in a row of 24 each. A state returned with another layout would compile some programs twice.
    assert sorted(compiled) == PROGRAMS
    keys = engine.init_decode_state().layers[0].keys
    tensor = meshes.sampler.shape["tensor"]
    shard = (slots * tensor // 8, max(CONFIG.kv_heads // tensor, 1), CONFIG.head_dim, MAX_PROMPT + LIMIT)
    assert keys.sharding.shard_shape(keys.shape) == shard
