"""The optimizer update: the gradient of a minibatch, the old policy, and AdamW."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.losses import dapo_loss, supervised_loss
from dapo_jax.dapo.metrics import Max, Mean, to_scalars
from dapo_jax.dapo.objectives import OBJECTIVES as BUILT_IN
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.decoder import graph_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater, trace_objective

CONFIG = tiny_decoder_config(layers=1, embed_dim=16, mlp_dim=16, heads=2, kv_heads=2)
GRAPH = graph_of(CONFIG)
KEEP_GRADIENT = optax.trace(decay=0.0)
"""An optimizer whose state is the last gradient, without rounding."""
SEQ = 16


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def make_rows(count=8, seed=0):
    """Responses of 5 to 12 tokens after prompts of 4, so that no two fit into a row of 16. Old log-probabilities are near the model's, so that some ratios
    are clipped. One row is not in the loss."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        response = rng.integers(2, CONFIG.vocab_size, rng.integers(5, 13)).astype(np.int32)
        row = Example(
            prompt=Tokens(rng.integers(2, CONFIG.vocab_size, 4).astype(np.int32)),
            response=Tokens(response, logprobs=rng.normal(-3.0, 0.5, len(response)).astype(np.float32)),
            advantage=float(rng.normal()),
            in_loss=index != 3,
        )
        rows.append(row)
    return rows


ROWS = make_rows()
WEIGHTS = np.random.default_rng(1).uniform(0.01, 0.05, len(ROWS)) * [row.in_loss for row in ROWS]


def packed(rows=ROWS, weights=WEIGHTS, *, row_tokens=SEQ, per=8, shorter=()):
    return pack(rows, weights, row_tokens=row_tokens, rows_per_microbatch=per, shorter_rows=shorter)


def make_updater(mesh=None, *, optimizer=KEEP_GRADIENT, objective=dapo_loss, reference=None, **options):
    options = UpdateOptions(**{"old_logprobs": "sampler", "logprob_chunk_vocab": 64, **options})
    return Updater(
        GRAPH, PARAMS, optimizer, mesh or one_device(), objective=objective, options=options, reference=reference
    )  # fmt: skip


PARAMS = tiny_params(CONFIG)


def fresh(optimizer=KEEP_GRADIENT, mesh=None, params=PARAMS):
    return init_state(params, optimizer, mesh or one_device())


def on_host(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))]


def step(updater, state, microbatches, *, first=False, learning_rate=1.0):
    [minibatch] = updater.prepare(state, [microbatches])
    state, metrics = updater.update(state, minibatch, learning_rate=learning_rate, first=first)
    return state, to_scalars(metrics)


def gradient(updater, microbatches, mesh=None, params=PARAMS, **how):
    state, _ = step(updater, fresh(mesh=mesh, params=params), microbatches, **how)
    return on_host(state.opt_state)


def assert_same_gradient(found, expected, tolerance=1e-6):
    largest = max(np.abs(leaf).max() for leaf in expected)
    assert largest > 1e-3
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


def plain_logprobs(params, tokens, temperature=1.0):
    """Returns the log-probability of the token at t in column t, without packing and chunks."""
    decoder = nnx.merge(GRAPH, params)
    rows, seq = tokens.shape
    at = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32)[None], (rows, seq))
    hidden = decoder(tokens, at, jnp.ones_like(tokens))
    logits = jnp.einsum("rse,ve->rsv", hidden, decoder.ends.unembedding())
    logprobs = jax.nn.log_softmax(logits[:, :-1] / temperature, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def raises(logprobs, old_logprobs, advantages, mask, *, weights):
    return logprobs.no_such_name, {}


def asks_for(logprobs, old_logprobs, advantages, mask, *, weights, entropies):
    return logprobs.sum(), {}


OBJECTIVES = {
    "an unknown array": (
        asks_for,
        "requires the array 'entropies'. Did you mean 'entropy'?",
    ),
    "a scalar": (lambda logprobs, *_, weights: logprobs.sum(), "an array float32[]"),
    "three": (lambda logprobs, *_, weights: (logprobs.sum(), {}, {}), "a tuple, not two values"),
    "a loss for each token": (lambda logprobs, *_, weights: (logprobs, {}), "float32[2, 5] as the loss"),
    "a text": (lambda *_, weights: ("low", {}), "a str as the loss"),
    "metrics in a list": (lambda logprobs, *_, weights: (logprobs.sum(), []), "a list as the metrics"),
    "a number as a metric": (
        lambda logprobs, *_, weights: (logprobs.sum(), {"my/mean": logprobs.mean()}),
        "float32[] as the metric 'my/mean'",
    ),
    "an array in a metric": (
        lambda logprobs, *_, weights: (logprobs.sum(), {"my/max": Max(logprobs)}),
        "a Max as the metric 'my/max'",
    ),
    "without weights": (lambda logprobs, *_: (logprobs.sum(), {}), "raised TypeError"),
    "an error of its own": (raises, "objective raises raised AttributeError"),
}
"""Name -> objective, and a part of the error message."""


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_invalid_objective_is_refused_by_name(name):
    objective, found = OBJECTIVES[name]
    with pytest.raises(ValueError, match=re.escape(found)) as refused:
        trace_objective(objective, rows=2, row_tokens=5)
    assert objective.__qualname__ in str(refused.value)
    assert "(loss, metrics)" in str(refused.value)


@pytest.mark.parametrize(
    "objective",
    [supervised_loss, lambda logprobs, *_, weights: (0.0, {}), *BUILT_IN.values()],
    ids=["sft", "0", *BUILT_IN],
)
def test_valid_objectives_are_accepted(objective):
    trace_objective(objective, rows=2, row_tokens=5)


@pytest.fixture(scope="module")
def sampler_updater():
    """`old_logprobs: sampler`, so that ratios are far from 1 and some are clipped."""
    return make_updater()


@pytest.fixture(scope="module")
def trainer_updater():
    return make_updater(old_logprobs="trainer")


@pytest.fixture(scope="module")
def whole(sampler_updater):
    """The gradient of the minibatch in one microbatch of unpacked rows."""
    return gradient(sampler_updater, packed())


def test_the_gradient_is_that_of_the_written_out_loss(whole):
    [m] = packed()

    def loss(params):
        ratio = jnp.exp(plain_logprobs(params, jnp.asarray(m.tokens)) - m.sampler_logprobs)
        surrogate = jnp.minimum(ratio * m.advantages, jnp.clip(ratio, 0.8, 1.28) * m.advantages)
        return -jnp.where(m.mask, m.weights * surrogate, 0.0).sum()

    assert_same_gradient(whole, on_host(jax.jit(jax.grad(loss))(PARAMS)), tolerance=5e-6)


@pytest.mark.parametrize(
    ("row_tokens", "per", "microbatches"),
    [
        pytest.param(SEQ, 1, 8, id="8 microbatches"),
        pytest.param(48, 1, 3, id="packed, 3 microbatches"),
        # The other cases cover both differences.
        pytest.param(SEQ, 4, 2, id="2 microbatches", marks=pytest.mark.slow),
        pytest.param(48, 4, 1, id="packed", marks=pytest.mark.slow),
    ],
)
def test_the_gradient_does_not_depend_on_packing_or_microbatches(
    sampler_updater, whole, row_tokens, per, microbatches
):
    parts = packed(row_tokens=row_tokens, per=per)
    assert len(parts) == microbatches
    assert_same_gradient(gradient(sampler_updater, parts), whole)


def test_shared_prompts_do_not_change_the_gradient(sampler_updater):
    """Rows of 16 tokens hold one response each. A row of 128 holds all: the prompt is computed once instead of 8 times."""
    rows = [replace(row, prompt=ROWS[0].prompt) for row in ROWS]
    apart, shared = packed(rows), packed(rows, row_tokens=128, per=1)
    assert len(shared) == 1
    assert (shared[0].segment_ids > 0).sum() == (apart[0].segment_ids > 0).sum() - 7 * 4
    expected = gradient(sampler_updater, apart)
    assert_same_gradient(gradient(sampler_updater, shared), expected)
    _, ours = step(sampler_updater, fresh(), shared)
    _, theirs = step(sampler_updater, fresh(), apart)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7, nan_ok=True)


# Slow: compiles for eight devices, as tests/parallel/training_layout_test.py does.
@pytest.mark.slow
def test_the_gradient_does_not_depend_on_the_mesh(whole):
    """Eight devices: rows over data 2 x fsdp 2, weights over fsdp 2 and tensor 2."""
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    updater = make_updater(mesh)
    assert_same_gradient(gradient(updater, packed(), mesh=mesh), whole)


def test_the_first_update_has_ratio_one_and_later_ones_the_weights_that_sampled(trainer_updater):
    """The old log-probabilities are recomputed once, before the first update, at the sampling temperature of 0.5."""
    optimizer = optax.sgd(1.0)
    updater = make_updater(old_logprobs="trainer", optimizer=optimizer, temperature=0.5)
    minibatches = [packed(), packed(make_rows(seed=1))]
    state = fresh(optimizer)
    prepared = updater.prepare(state, minibatches)
    scored, [m] = prepared[1][0].microbatches.old_logprobs[0], minibatches[1]
    expected = jax.jit(plain_logprobs)(PARAMS, jnp.asarray(m.tokens), 0.5)
    np.testing.assert_allclose(scored[m.mask], expected[m.mask], rtol=1e-5, atol=1e-5)

    state, first = updater.update(state, prepared[0], learning_rate=0.5, first=True)
    state, second = updater.update(state, prepared[1], learning_rate=0.5, first=False)
    first, second = to_scalars(first), to_scalars(second)
    assert first["policy/ratio_max"] == first["policy/ratio"] == 1.0
    assert first["policy/kl_old_k3"] == first["policy/clip_high_frac"] == first["policy/clip_low_frac"] == 0.0
    assert abs(second["policy/ratio_max"] - 1.0) > 1e-3


def test_with_old_logprobs_sampler_the_recorded_ones_are_used(sampler_updater):
    parts = packed()
    [prepared] = sampler_updater.prepare(fresh(), [parts])
    np.testing.assert_array_equal(prepared[0].microbatches.old_logprobs[0], parts[0].sampler_logprobs)
    _, scalars = step(sampler_updater, fresh(), parts, first=True)
    m = parts[0]
    logprobs = np.asarray(jax.jit(plain_logprobs)(PARAMS, jnp.asarray(m.tokens)))
    ratio = np.exp(logprobs - m.sampler_logprobs)[m.mask]
    assert scalars["policy/ratio_max"] == pytest.approx(ratio.max(), rel=1e-4)


@pytest.mark.parametrize("which", ["sampler", "trainer"])
def test_the_sampler_is_compared_with_the_trainer_whichever_is_the_old_policy(
    which, sampler_updater, trainer_updater
):
    """With delta = trainer - sampler of each token: mean |delta|, max |delta|, and k3 = mean(e^delta - 1 - delta)."""
    [m] = packed()
    logprobs = np.asarray(jax.jit(plain_logprobs)(PARAMS, jnp.asarray(m.tokens)), np.float64)
    delta = (logprobs - m.sampler_logprobs)[m.mask]
    _, scalars = step(
        {"sampler": sampler_updater, "trainer": trainer_updater}[which], fresh(), [m], first=True
    )
    assert scalars["sync/logprob_diff_mean"] == pytest.approx(np.abs(delta).mean(), rel=1e-4)
    assert scalars["sync/logprob_diff_max"] == pytest.approx(np.abs(delta).max(), rel=1e-4)
    assert scalars["sync/sampler_trainer_kl"] == pytest.approx((np.exp(delta) - 1 - delta).mean(), rel=1e-4)


def test_later_updates_are_not_compared_with_the_sampler(sampler_updater):
    """After the first update, the policy differs from the policy that sampled."""
    _, scalars = step(sampler_updater, fresh(), packed(), first=False)
    assert math.isnan(scalars["sync/logprob_diff_mean"])
    assert scalars["sync/logprob_diff_max"] == 0.0


def probe(logprobs, old_logprobs, advantages, mask, *, weights):
    """An objective with a linear loss whose metric is the sum of the weights."""
    loss = -(weights * jnp.where(mask, logprobs, 0.0)).sum() + jnp.where(mask, advantages, 0.0).max()
    return loss, {"probe/weights": Mean(jnp.where(mask, weights, 0.0).sum(), jnp.ones(()))}


def test_an_objective_receives_the_arrays_that_it_asks_for():
    """Each array as the microbatch has it, the entropy of the policy, and the reference policy's log-probabilities, which equal the policy's."""
    seen = {}

    def shows(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        *,
        weights,
        segment_ids,
        positions,
        sampler_logprobs,
        entropy,
        ref_logprobs,
    ):
        total = {
            "segment_ids": segment_ids,
            "positions": positions,
            "sampler_logprobs": sampler_logprobs,
            "weights": weights,
        }
        total |= {"entropy": entropy, "distance": jnp.abs(ref_logprobs - logprobs)}
        seen.update(dict.fromkeys(total))
        sums = {name: jnp.where(mask, array.astype(jnp.float32), 0.0).sum() for name, array in total.items()}
        return 0.0 * jnp.where(mask, logprobs, 0.0).sum(), {
            f"own/{name}": Mean(x, jnp.ones(())) for name, x in sums.items()
        }

    [m] = packed(row_tokens=128, per=1)
    _, scalars = step(make_updater(objective=shows, reference=PARAMS), fresh(), [m])
    for name in ("segment_ids", "positions", "sampler_logprobs", "weights"):
        assert scalars[f"own/{name}"] == pytest.approx(float(getattr(m, name)[m.mask].sum()), rel=1e-5)
    assert scalars["own/entropy"] == pytest.approx(scalars["policy/entropy"] * m.mask.sum(), rel=1e-5)
    assert scalars["own/distance"] == 0.0
    with pytest.raises(ValueError, match="ref_logprobs"):
        make_updater(objective=shows)


def with_logprobs(row, logprobs):
    return replace(row, response=Tokens(row.response.ids, logprobs=logprobs))


def test_off_policy_responses_are_dropped_from_the_objective_but_not_from_the_kl():
    """The objective only sums its weights. The sampler of every second response is 1 nat per token away from the policy."""

    def nothing(logprobs, old_logprobs, advantages, mask, *, weights):
        return 0.0 * jnp.where(mask, logprobs, 0.0).sum(), {
            "own/weights": Mean(jnp.where(mask, weights, 0.0).sum(), jnp.ones(()))
        }

    [m] = packed()
    logprobs = np.asarray(jax.jit(plain_logprobs)(PARAMS, jnp.asarray(m.tokens)))
    rows = [
        with_logprobs(row, logprobs[line, 4 : 4 + len(row.response)] + np.float32(line % 2))
        for line, row in enumerate(ROWS)
    ]
    options = {
        "objective": nothing,
        "reference": jax.tree.map(lambda leaf: leaf * 1.1, PARAMS),
        "kl_coef": 0.5,
    }
    state, scalars = step(make_updater(**options, drop_off_policy=0.5), fresh(), packed(rows))
    lengths = np.array([len(row.response.ids) * row.in_loss for row in rows])
    dropped = np.array([line % 2 == 1 and row.advantage < 0 for line, row in enumerate(rows)])
    assert 0 < lengths[dropped].sum() < lengths.sum()
    assert scalars["importance/dropped_frac"] == pytest.approx(
        lengths[dropped].sum() / lengths.sum(), rel=1e-6
    )
    assert scalars["own/weights"] == pytest.approx((lengths * WEIGHTS)[~dropped].sum(), rel=1e-5)
    assert_same_gradient(on_host(state.opt_state), gradient(make_updater(**options), packed(rows)))


CAPPED = {"correction": "truncate", "importance_range": (0.0, 2.0)}


@pytest.fixture(scope="module")
def probe_updater():
    return make_updater(old_logprobs="trainer", objective=probe, **CAPPED)


def test_importance_weights_are_capped(probe_updater):
    """pi_old / pi_sampler is 0.5 for one response and 3, capped at 2, for another with as many tokens. With weight w per token, the weights add up to
    n w (0.5 + 2)."""
    n, w = 6, 0.125
    tokens = np.arange(2, 2 + n, dtype=np.int32)
    rows = [replace(row, response=Tokens(tokens)) for row in ROWS[:2]]
    state = fresh()
    _, scored = probe_updater.prepare(state, [packed(), packed(rows, np.full(2, w))])
    old = np.asarray(scored[0].microbatches.old_logprobs[0])
    rows = [
        with_logprobs(row, old[line, 4 : 4 + n] - np.log(ratio))
        for line, (row, ratio) in enumerate(zip(rows, (0.5, 3.0), strict=True))
    ]
    _, scalars = step(probe_updater, state, packed(rows, np.full(2, w)), first=True)
    assert scalars["probe/weights"] == pytest.approx(n * w * (0.5 + 2.0), rel=1e-5)


def test_without_a_correction_the_program_and_the_metrics_do_not_contain_it():
    """Bounds without a correction do not change the program; with a correction it is longer."""
    state = jax.eval_shape(lambda params: fresh(params=params), PARAMS)

    def program(**options):
        updater = make_updater(old_logprobs="trainer", **options)
        return updater.programs(state, capacity=1, rows=2, lengths=[SEQ])["update_add_longest"]()

    plain = program()
    assert program(importance_range=(0.5, 2.0)).as_text() == plain.as_text()
    assert not [name for name in plain.out_info[1] if name.startswith("importance/")]
    assert len(program(**CAPPED).as_text()) > len(plain.as_text())


@pytest.mark.parametrize(("reference", "kl_coef"), [(None, 0.1), (PARAMS, 0.0)])
def test_a_reference_policy_is_there_exactly_when_the_kl_asks_for_it(reference, kl_coef):
    with pytest.raises(ValueError, match="reference policy"):
        make_updater(reference=reference, kl_coef=kl_coef)


def test_the_kl_pulls_towards_the_reference_and_rests_there():
    """k3's slope is 1 - e^(ref - logprob): exactly 0 at the reference, and of the weights' sign beyond it."""

    def nothing(logprobs, old_logprobs, advantages, mask, *, weights):
        return 0.0 * jnp.where(mask, logprobs, 0.0).sum(), {}

    updater = make_updater(objective=nothing, reference=PARAMS, kl_coef=0.5)
    at_rest = gradient(updater, packed())
    assert max(np.abs(leaf).max() for leaf in at_rest) == 0.0
    elsewhere = jax.tree.map(lambda leaf: leaf * 1.1, PARAMS)
    state, scalars = step(updater, fresh(params=elsewhere), packed())
    assert scalars["policy/kl_ref_k3"] > 0

    [m] = packed()
    reference = jax.jit(plain_logprobs)(PARAMS, jnp.asarray(m.tokens))

    def penalty(params):
        gap = jnp.where(m.mask, reference - plain_logprobs(params, jnp.asarray(m.tokens)), 0.0)
        return 0.5 * (m.weights * (jnp.exp(gap) - 1.0 - gap)).sum()

    expected = on_host(jax.jit(jax.grad(penalty))(elsewhere))
    assert_same_gradient(on_host(state.opt_state), expected, tolerance=1e-4)  # exp(gap) - 1 cancels


def adamw():
    return make_optimizer(max_grad_norm=0.05)


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_an_update_that_is_not_finite_changes_not_a_bit(what):
    """A NaN advantage makes the loss and the gradient NaN; an infinite one, in the probe, the loss alone."""
    optimizer = adamw()
    how = {} if what == "gradient" else {"objective": probe, "old_logprobs": "trainer", **CAPPED}
    updater = make_updater(optimizer=optimizer, **how)
    state, _ = step(updater, fresh(optimizer), packed(), learning_rate=0.1)  # moments that are not zero
    before = on_host(state)
    bad = math.nan if what == "gradient" else math.inf
    rows = [*ROWS[:-1], replace(ROWS[-1], advantage=bad)]
    state, scalars = step(updater, state, packed(rows), learning_rate=0.1)
    for a, b in zip(on_host(state), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert scalars["update/skipped_frac"] == 1.0
    changes = [name for name in scalars if name.startswith("update/step_rms/")]
    for name in ("update/loss", "update/grad_norm", *changes):
        assert math.isnan(scalars[name])  # no applied update was counted
    assert not [name for name in scalars if name.startswith("update/ratio/")]
    _, scalars = step(updater, state, packed(), learning_rate=0.1)
    assert scalars["update/skipped_frac"] == 0.0
    assert changes
    assert min(scalars[name] for name in changes) > 0.0


def numpy_adamw(params, gradients, rates, *, clip, beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.1):
    """AdamW (Loshchilov and Hutter 2019, decay inside the rate as in torch) after a global-norm clip, in float64."""
    params = [leaf.astype(np.float64) for leaf in params]
    first, second = [np.zeros_like(leaf) for leaf in params], [np.zeros_like(leaf) for leaf in params]
    for t, (grads, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads))
        for i, g in enumerate(grads):
            g = g.astype(np.float64) * min(1.0, clip / norm)
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            direction = first[i] / (1 - beta1**t) / (np.sqrt(second[i] / (1 - beta2**t)) + epsilon)
            params[i] = params[i] - rate * (direction + decay * params[i])
    return params


def test_three_updates_are_adamw_with_decay_and_clipping_as_written_down(sampler_updater):
    """The gradients are the library's, at the weights of the time; all the rest is numpy. Their norm is about 0.2 here,
    so a clip at 0.05 acts."""
    optimizer, rates = adamw(), [0.001, 0.002, 0.003]
    updater = make_updater(optimizer=optimizer)
    state, gradients = fresh(optimizer), []
    for rate in rates:
        gradients.append(gradient(sampler_updater, packed(), params=state.params))
        state, scalars = step(updater, state, packed(), learning_rate=rate)
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients[-1]))
        assert scalars["update/grad_norm"] == pytest.approx(norm, rel=1e-5)  # logged before clipping
        assert norm > 0.05
    expected = numpy_adamw(on_host(PARAMS), gradients, rates, clip=0.05)
    for found, leaf in zip(on_host(state.params), expected, strict=True):
        np.testing.assert_allclose(found, leaf, rtol=2e-6, atol=2e-6)


def test_the_callers_parameters_survive_the_first_update():
    """`update` donates its state, but not the initial parameters."""
    before = on_host(PARAMS)
    state = init_state(PARAMS, KEEP_GRADIENT, one_device())
    jax.tree.map(lambda leaf: leaf.delete(), state.params)
    for a, b in zip(on_host(PARAMS), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_programs_that_can_be_lowered_are_those_that_an_update_calls():
    """There is a program at the begin, one per row length, and one at the end. A gradient of the parameters' size and the loss are kept between them."""
    updater = make_updater()
    state = jax.eval_shape(lambda params: fresh(params=params), PARAMS)
    one = updater.programs(state, capacity=2, rows=2, lengths=(32,))
    assert list(one) == ["update_begin", "update_add_longest", "update_apply"]
    several = updater.programs(state, capacity=2, rows=2, lengths=(32, 16, 8))
    names = {name: lower().as_text().split()[1] for name, lower in several.items()}
    assert names == {
        "update_begin": "@jit__nothing_program",
        "update_add_longest": "@jit__add_program",
        "update_add_shortest": "@jit__add_program",
        "update_apply": "@jit__apply_program",
    }
    begun = several["update_begin"]().compile().memory_analysis().output_size_in_bytes
    sums = jax.tree.leaves(updater.sums_structs(state))
    assert sum(leaf.size * 4 for leaf in sums) == sum(leaf.size * 4 for leaf in jax.tree.leaves(PARAMS)) + 4
    # Some versions of XLA also count the pointers of a tuple.
    assert 0 <= begun - sum(leaf.size * 4 for leaf in sums) <= 8 * len(sums)


def test_steps_with_fewer_microbatches_compile_nothing():
    """3, 4, 2 and 1 microbatches are stored in arrays with capacity 4, whose rest is not read."""
    updater = make_updater()
    whole = gradient(updater, packed(per=2)[:3])
    for count in (4, 2, 1, 3):
        found = gradient(updater, packed(per=2)[:count])
    assert_same_gradient(found, whole)
    assert updater._add._program._cache_size() == 1


MIXED = {"row_tokens": 48, "per": 2, "shorter": (24, 16, 12)}


def test_microbatches_with_rows_of_several_lengths_give_the_same_gradient_and_metrics(sampler_updater, whole):
    parts = packed(**MIXED)
    assert len({part.tokens.shape for part in parts}) > 1
    assert_same_gradient(gradient(sampler_updater, parts), whole)
    _, expected = step(sampler_updater, fresh(), packed())
    _, found = step(sampler_updater, fresh(), parts)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True), name


# Slow with one length: compiles another update.
@pytest.mark.parametrize(
    "how",
    [pytest.param({}, id="one length", marks=pytest.mark.slow), pytest.param(MIXED, id="several lengths")],
)
def test_recomputed_old_logprobs_give_the_gradient_of_the_first_update(trainer_updater, how):
    """Without a change of weights, recomputed old log-probabilities equal the current ones."""
    state = fresh()
    _, second = trainer_updater.prepare(state, [packed(), packed(**how)])
    later, _ = trainer_updater.update(state, second, learning_rate=0.0, first=False)
    first = gradient(trainer_updater, packed(), first=True)
    assert_same_gradient(on_host(later.opt_state), first, tolerance=1e-5)


def test_an_update_that_is_not_finite_in_a_shorter_row_changes_nothing(sampler_updater):
    parts = packed(**MIXED)
    last = parts[-1]
    parts[-1] = replace(last, advantages=np.where(last.mask, np.nan, 0.0).astype(np.float32))
    state, scalars = step(sampler_updater, fresh(), parts)
    assert scalars["update/skipped_frac"] == 1.0
    for found, kept in zip(on_host(state.params), on_host(PARAMS), strict=True):
        np.testing.assert_array_equal(found, kept)


@jax.jit
def slowly(state):
    """The same state, after about two seconds."""
    busy = jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), jnp.full((600, 600), 0.01))
    return jax.tree.map(lambda leaf: leaf + (0.0 * busy[0, 0]).astype(leaf.dtype), state)


def test_the_host_waits_for_no_program_of_a_step_s_updates(trainer_updater):
    """All programs, with rows of several lengths and the ratios of a logged update, are dispatched before the device has computed the first weights."""
    for attempt in ("compiles", "measured"):
        state = slowly(fresh()) if attempt == "measured" else fresh()
        prepared, found = trainer_updater.prepare(state, [packed(**MIXED), packed()]), []
        for index, minibatch in enumerate(prepared):
            found += trainer_updater.ratios(state, minibatch, first=index == 0)
            state, metrics = trainer_updater.update(state, minibatch, learning_rate=1.0, first=index == 0)
            found += jax.tree.leaves((state, metrics))
        if attempt == "measured":
            assert not any(leaf.is_ready() for leaf in found if not leaf.is_deleted())
        jax.block_until_ready(state)
