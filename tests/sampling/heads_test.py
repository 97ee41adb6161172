"""The sampler records its most probable tokens with each sampled token, and the trainer computes the same log-probabilities for them, with its own rows and chunks."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.tokens import HEADS, Tokens, head_shapes
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.rollout.checkpoint_arrays import drawn_arrays, drawn_of, flight_arrays, flight_of
from dapo_jax.rollout.collector import Collector
from dapo_jax.rollout.virtual_clock import ClockSizes, VirtualClock
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.round_sampler import RoundSampler
from dapo_jax.testing import tiny_params
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater
from tests.sampling.continuous_batching_test import (
    CONFIG,
    GROUP,
    KEY,
    LIMIT,
    all_of,
    examples_of,
    made,
    one_device,
    prompts,
    sample,
    weights_of,
)
from tests.sampling.turns_test import Appending, new_context

COUNT = 5
ROUNDING = 2e-5
"""Bound on the difference of the sampler's and the trainer's log-probabilities, as in `continuous_batching_test`."""

engine_of = functools.cache(functools.partial(made, heads=COUNT))


@functools.cache
def updater_of(mesh=None, **options):
    graph = graph_of(CONFIG, layout=layout_of(mesh or one_device()))
    how = UpdateOptions(logprob_chunk_vocab=100, recorded=head_shapes(COUNT), **options)
    return Updater(graph, shapes_of(CONFIG), make_optimizer(), mesh or one_device(), options=how)


def trained(rows, *, seed=0, mesh=None, advantage=0.0, learning_rate=0.0, rows_at_once=24, **options):
    """The filled arrays of a step's second minibatch, and the state and the metrics of an update on it."""
    updater, params = updater_of(mesh, **options), tiny_params(CONFIG, seed=seed)
    params = params if mesh is None else jax.device_put(params, shardings(params, mesh))
    state = init_state(params, make_optimizer(), mesh or one_device())
    rows = [replace(row, advantage=advantage * (-1.0) ** at) for at, row in enumerate(rows)]
    packed = pack(
        rows,
        np.full(len(rows), 1e-2),
        row_tokens=40,
        rows_per_microbatch=rows_at_once,
        spread=2 if mesh else 1,
    )
    _, [second] = updater.prepare(state, [packed, packed])
    m = jax.device_get(second.microbatches)
    state, metrics = updater.update(state, (second,), learning_rate=learning_rate, first=True)
    return m, state, to_scalars(metrics)


def assert_the_trainers(m, tolerance=ROUNDING):
    """The trainer computes the recorded log-probabilities, also of sampled tokens that are in the head."""
    recorded, ids = m.recorded["head_logprobs"], m.recorded["head_ids"]
    assert np.abs(recorded - m.old_head_logprobs)[m.mask].max() <= tolerance
    assert (np.diff(recorded[m.mask], axis=-1) <= 0).all()
    assert all(len(set(each)) == COUNT for each in ids[m.mask].tolist())
    is_sampled = (ids == m.tokens[..., None]) & m.mask[..., None]
    assert is_sampled.any()
    np.testing.assert_array_equal(
        np.where(is_sampled, recorded, 0.0), np.where(is_sampled, m.sampler_logprobs[..., None], 0.0)
    )
    assert not recorded[~m.mask & (m.sampler_logprobs == 0)].any(), "prompts and padding have no record"


@pytest.mark.parametrize(
    "how",
    [
        {"page_tokens": 4, "cache_tokens": 48},
        # Slow: compile further samplers. Pages are the harder case.
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"batch_invariant": True}, marks=pytest.mark.slow),
    ],
    ids=["preempted", "slots", "batch invariant"],
)
def test_the_trainer_computes_the_recorded_logprobs(how):
    """With 48 cached tokens in pages of 4, responses are preempted, and their tokens are not recorded again."""
    sampled = sample(engine_of(8, **how), prompts(0, 1, 2, 3, 4))
    for response in all_of(sampled):
        assert [response.record.arrays[name].dtype for name in HEADS] == [np.int32, np.float32]
        assert response.record.arrays["head_ids"].shape == (len(response.tokens), COUNT)
    m, _, metrics = trained(examples_of(sampled))
    assert_the_trainers(m)
    # Sampler and trainer have the same weights, so their heads differ by rounding only.
    assert metrics["center/sampler_head"] == pytest.approx(metrics["center/trainer_head"], abs=1e-5)


# Slow: compiles another sampler.
@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"batch_invariant": True}], ids=["fed", "prefilled again"])
def test_tokens_of_environments_have_no_record(how):
    """Tokens are appended to turns, and contexts are replaced."""
    engine = engine_of(8, has_turns=True, **how)
    sampled = sample(engine, prompts(0, 1, 2), environments=Appending(new_context, turn_tokens=3))
    for response in all_of(sampled):
        recorded = response.record.arrays["head_logprobs"].any(-1)
        np.testing.assert_array_equal(recorded, response.sampled)
    assert_the_trainers(trained(examples_of(sampled))[0])


def test_responses_in_flight_keep_their_records_and_other_processes_and_checkpoints_get_them():
    """Twelve responses share four slots, so they pause. After a round the weights change, and the tokens are prefilled again, but not recorded again."""
    sizes = ClockSizes(in_flight=12, samples_per_prompt=GROUP, needed=2, answer_rounds=0)
    asked = {prompt.ordinal: prompt for prompt in prompts(0, 1, 2)}
    engine = engine_of(4, 4, in_flight=12, page_tokens=4)
    here, there = (
        Collector(clock=VirtualClock(sizes), ready={}, prompt_at=asked.__getitem__) for _ in range(2)
    )
    for collector in (here, there):
        collector.start()
    rounds = [
        RoundSampler(engine, weights_of(seed), key=KEY, decoding=decoding(), max_response_tokens=LIMIT)
        for seed in (0, 1)
    ]
    names = [one for one in here.responses if here.draws(one)]
    drawn = rounds[0].draw([here.responses[one] for one in names], 3)
    sent = drawn_of({name: array.copy() for name, array in drawn_arrays(drawn).items()})
    here.take(dict(zip(names, drawn, strict=True)), set(names))
    there.take(dict(zip(names, sent, strict=True)), set())
    here.end_round()
    restored = flight_of(flight_arrays(here.going_on()), asked.__getitem__)
    for one, request in restored.responses.items():
        np.testing.assert_equal(there.responses[one].record.arrays, request.record.arrays)
    going = [request for request in restored.responses.values() if request.drawn == 3]
    before = [request.record.copy() for request in going]
    for request in going:
        request.version = 1
    rounds[1].draw(going, 4)
    for request, old in zip(going, before, strict=True):
        np.testing.assert_equal(request.record.cut(0, 3).arrays, old.arrays)
    rows = [
        Example(
            prompt=Tokens(request.prompt.tokens),
            response=request.record,
            sampled=np.arange(request.drawn) >= 3,
        )
        for request in going
    ]
    assert len(rows) > 6
    assert_the_trainers(trained(rows, seed=1)[0])
    old = [replace(row, sampled=~row.sampled) for row in rows]
    m, *_ = trained(old, seed=1)
    assert np.abs(m.recorded["head_logprobs"] - m.old_head_logprobs)[m.mask].max() > 1e-3


# Slow: compile updates for one and for eight devices.
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"correction": "truncate", "importance_range": (0.0, 2.0)}, {"old_logprobs": "sampler"}]
)
def test_packing_microbatches_and_devices_change_the_update_by_rounding_only(options):
    """A step of AdamW has the size of the learning rate whatever the gradient is, so the norm of the gradient is compared, too: 1e-5 for sums in another order in float32."""
    sampled = sample(engine_of(8, page_tokens=4, cache_tokens=48), prompts(0, 1, 2, 3, 4))
    rows = examples_of(sampled)
    mesh = make_mesh(data=1, fsdp=2, tensor=2, context=2)
    how = {"seed": 1, "advantage": 1.0, **options}
    (_, _, expected), *others = (
        trained(rows, **how), trained(rows, rows_at_once=4, **how), trained(rows, mesh=mesh, **how),
    )  # fmt: skip
    assert expected["center/push"] > 1e-2, "the weights have changed since sampling"
    for _, _, found in others:
        for name in (
            "update/grad_norm",
            "update/loss",
            "center/push",
            "center/sampler_head",
            "center/trainer_head",
        ):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
