"""The update of on-policy distillation with a teacher of another shape than the student, compared with float64 (the oracle of `correction_test`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.models.decoder import graph_of
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater
from tests.training.correction_test import (
    CONFIG,
    HIGH,
    KEEP_GRADIENT,
    LATER,
    LOW,
    PARAMS,
    batches,
    exact_logprobs,
    in_float64,
    logprobs_of,
    one_device,
)

TEACHER_CONFIG = tiny_decoder_config(layers=2, embed_dim=24, mlp_dim=16, heads=2, kv_heads=2)
TEACHER = tiny_params(TEACHER_CONFIG, seed=9)
COEF = 0.7


def teachers_logprobs(tokens):
    """Returns the teacher's log-probabilities in float64."""
    with jax.enable_x64(True):
        program = jax.jit(lambda p, tokens: logprobs_of(p, tokens, TEACHER_CONFIG))
        return np.asarray(program(in_float64(TEACHER), tokens))


def exact_gradient(batch, params):
    r"""Returns the gradient of $-\sum w \min(r A, \mathrm{clip}(r) A)$ with $A = A_\text{task} + c (\log \pi_\text{teacher} - \log \pi_\text{old})$, and the mean of $\log \pi_\text{old} - \log \pi_\text{teacher}$."""
    old, mask = exact_logprobs(PARAMS, batch.tokens), batch.mask
    difference = np.where(mask, teachers_logprobs(batch.tokens) - old, 0.0)
    advantage = batch.advantages.astype(np.float32).astype(np.float64)[:, None] + COEF * difference
    weight = batch.weights.astype(np.float64)[:, None]

    def loss(p):
        ratio = jnp.exp(jnp.where(mask, logprobs_of(p, batch.tokens) - old, 0.0))
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
        return -jnp.where(mask, weight * gain, 0.0).sum()

    with jax.enable_x64(True):
        found = jax.jit(jax.grad(loss))(in_float64(params))
    return {name: np.asarray(leaf) for name, leaf in found.items()}, -difference[mask].mean()


def graph(config, mesh):
    return graph_of(config, layout=layout_of(mesh, attention="xla"))


def scores_of(config, params, mesh):
    options = UpdateOptions(logprob_chunk_vocab=8)
    return Updater(graph(config, mesh), params, KEEP_GRADIENT, mesh, options=options).scores(params)


def prepared(teacher, mesh):
    """Returns an updater with this teacher, and the two minibatches of a step."""
    options = UpdateOptions(logprob_chunk_vocab=8, teacher_coef=COEF)
    updater = Updater(
        graph(CONFIG, mesh), PARAMS, KEEP_GRADIENT, mesh, options=options, teacher=scores_of(*teacher, mesh)
    )
    state = init_state(PARAMS, KEEP_GRADIENT, mesh)
    return updater, updater.prepare(state, [each.packed() for each in batches()])


def test_the_gradient_equals_the_formulas_in_a_first_and_in_a_later_update():
    mesh = one_device()
    updater, minibatches = prepared((TEACHER_CONFIG, TEACHER), mesh)
    for batch, params, minibatch, first in zip(
        batches(), (PARAMS, LATER), minibatches, (True, False), strict=True
    ):
        state, metrics = updater.update(
            init_state(params, KEEP_GRADIENT, mesh), minibatch, learning_rate=1.0, first=first
        )
        expected, reverse_kl = exact_gradient(batch, params)
        largest = max(np.abs(leaf).max() for leaf in expected.values())
        found = in_float64(state.opt_state.trace)
        errors = {name: np.abs(found[name] - leaf).max() / largest for name, leaf in expected.items()}
        assert max(errors.values()) <= 1e-6, errors
        assert abs(reverse_kl) > 0.01
        assert to_scalars(metrics)["teacher/reverse_kl"] == pytest.approx(reverse_kl, rel=1e-5)


def test_with_the_student_as_the_teacher_the_advantages_are_zero():
    """A later update has the same scoring program on both sides. In the first, the old log-probabilities come from the update's own program: they are about
    -4, where float32 has steps of 2.4e-7 to 4.8e-7."""
    mesh = one_device()
    updater, (first, later) = prepared((CONFIG, PARAMS), mesh)
    for stack in later:
        np.testing.assert_array_equal(stack.microbatches.teacher_logprobs, stack.microbatches.old_logprobs)
    _, metrics = updater.update(init_state(PARAMS, KEEP_GRADIENT, mesh), first, learning_rate=1.0, first=True)
    assert abs(to_scalars(metrics)["teacher/reverse_kl"]) < 1e-6
