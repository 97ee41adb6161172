"""The update of on-policy distillation with a teacher of another shape than the student, compared with float64 (the oracle of `correction_test`)."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.models.decoder import graph_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater
from tests.training.correction_test import (
    CASES,
    CONFIG,
    HIGH,
    KEEP_GRADIENT,
    LATER,
    LOW,
    PARAMS,
    batches,
    exact_logprobs,
    exact_weights,
    in_float64,
    logits_of,
    logprobs_of,
    one_device,
)

TEACHER_CONFIG = tiny_decoder_config(layers=2, embed_dim=24, mlp_dim=16, heads=2, kv_heads=2, logit_cap=0.75)
"""The student's logits are not capped."""
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


def prepared(teacher, mesh, *, student=(CONFIG, PARAMS), objective=dapo_loss, **options):
    """Returns an updater with this teacher, and the two minibatches of a step."""
    options = UpdateOptions(logprob_chunk_vocab=8, teacher_coef=COEF, **options)
    config, params = teacher
    placed = jax.device_put(params, shardings(params, mesh))
    taught = graph(config, mesh), placed, nnx.State({})
    how = {"objective": objective, "options": options, "teacher": taught}
    updater = Updater(graph(student[0], mesh), student[1], KEEP_GRADIENT, mesh, **how)
    state = init_state(student[1], KEEP_GRADIENT, mesh)
    return updater, updater.prepare(state, [each.packed() for each in batches()])


def check(updater, minibatches, mesh, exact):
    """Compares the gradients and the metric of a first and a later update with `exact`."""
    for batch, params, minibatch, first in zip(
        batches(), (PARAMS, LATER), minibatches, (True, False), strict=True
    ):
        state, metrics = updater.update(
            init_state(params, KEEP_GRADIENT, mesh), minibatch, learning_rate=1.0, first=first
        )
        expected, reverse_kl = exact(batch, params)
        largest = max(np.abs(leaf).max() for leaf in expected.values())
        found = in_float64(state.opt_state.trace)
        errors = {name: np.abs(found[name] - leaf).max() / largest for name, leaf in expected.items()}
        assert max(errors.values()) <= 1e-6, errors
        assert abs(reverse_kl) > 0.01
        assert to_scalars(metrics)["teacher/reverse_kl"] == pytest.approx(reverse_kl, rel=1e-5)


def test_the_gradient_equals_the_formulas_in_a_first_and_in_a_later_update():
    mesh = one_device()
    updater, minibatches = prepared((TEACHER_CONFIG, TEACHER), mesh)
    check(updater, minibatches, mesh, exact_gradient)


def test_with_the_student_as_the_teacher_the_advantages_are_zero():
    """A later update has the same scoring program on both sides. In the first, the old log-probabilities come from the update's own program: they are about
    -4, where float32 has steps of 2.4e-7 to 4.8e-7."""
    mesh = one_device()
    updater, (first, later) = prepared((CONFIG, PARAMS), mesh)
    for stack in later:
        np.testing.assert_array_equal(stack.microbatches.teacher_logprobs, stack.microbatches.old_logprobs)
    _, metrics = updater.update(init_state(PARAMS, KEEP_GRADIENT, mesh), first, learning_rate=1.0, first=True)
    assert abs(to_scalars(metrics)["teacher/reverse_kl"]) < 1e-6


CONFIG_OF_TWO = replace(CONFIG, kv_heads=2)
WIDER = replace(TEACHER_CONFIG, vocab_size=26)
"""A teacher with 6 more vocabulary entries than the student. In parts along `tensor`, the same entries are on other devices."""


def exact_divergence(batch, params, teacher):
    r"""Returns the gradient of $-\sum w c \min(r A, \mathrm{clip}(r) A) + \beta \sum w c\, \mathrm{KL}(\pi, \pi_\text{teacher})$ with the importance weights c, and the mean of the divergence."""
    (config, its), size = teacher, CONFIG.vocab_size
    old, mask, weight = exact_logprobs(PARAMS, batch.tokens), batch.mask, exact_weights("truncate", batch)
    weight = weight * batch.weights.astype(np.float64)[:, None]
    advantage = batch.advantages.astype(np.float32).astype(np.float64)[:, None]

    def divergence(p):
        own, other = (
            jax.nn.log_softmax(logits_of(each, batch.tokens, shape)[:, :-1, :size])
            for each, shape in ((p, CONFIG), (in_float64(its), config))
        )
        return jnp.pad((jnp.exp(own) * (own - other)).sum(axis=-1), ((0, 0), (1, 0)))

    def loss(p):
        ratio = jnp.exp(jnp.where(mask, logprobs_of(p, batch.tokens) - old, 0.0))
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
        found = divergence(p)
        return jnp.where(mask, weight * (COEF * found - gain), 0.0).sum(), found[mask].mean()

    with jax.enable_x64(True):
        found, mean = jax.jit(jax.grad(loss, has_aux=True))(in_float64(params))
        return {name: np.asarray(leaf) for name, leaf in found.items()}, float(mean)


def full(teacher, mesh, **how):
    return prepared(
        teacher, mesh, teacher_kl="full", correction="truncate", importance_range=CASES["truncate"][1], **how
    )


# Slow: compiles another update. The wider teacher has the same code, and entries to ignore.
@pytest.mark.parametrize("config", [pytest.param(TEACHER_CONFIG, marks=pytest.mark.slow), WIDER])
def test_the_gradient_of_the_divergence_over_the_vocabulary_equals_the_formula(config):
    mesh, teacher = one_device(), (config, tiny_params(config, seed=9))
    updater, minibatches = full(teacher, mesh)
    assert all(stack.microbatches.teacher_logprobs is None for m in minibatches for stack in m)
    check(updater, minibatches, mesh, partial(exact_divergence, teacher=teacher))


# Slow: compiles an update for eight devices. tests/dapo/logprobs_test.py has a wider teacher; tests/parallel/training_layout_test.py has meshes.
@pytest.mark.slow
def test_on_a_mesh_the_divergence_has_the_same_gradient():
    """Float32, in another order of summation. The parts of both vocabularies differ along `tensor`: 10 and 13 entries."""
    student = CONFIG_OF_TWO, tiny_params(CONFIG_OF_TWO)
    found = []
    for mesh in (one_device(), make_mesh(fsdp=2, tensor=2, context=2)):
        updater, (first, _) = full((WIDER, tiny_params(WIDER, seed=9)), mesh, student=student)
        state, metrics = updater.update(
            init_state(student[1], KEEP_GRADIENT, mesh), first, learning_rate=1.0, first=True
        )
        found.append((in_float64(state.opt_state.trace), to_scalars(metrics)["teacher/reverse_kl"]))
    (expected, one), (gradient, other) = found
    assert one == pytest.approx(other, rel=1e-5)
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for name, leaf in expected.items():
        np.testing.assert_allclose(gradient[name], leaf, rtol=0, atol=1e-5 * largest)


def nothing(logprobs, old_logprobs, advantages, mask, *, weights):
    return jnp.zeros(()), {}


# Slow: compiles two updates. The test of the gradient of the divergence compares with float64.
@pytest.mark.slow
def test_with_the_student_as_the_teacher_divergence_and_gradient_are_zero():
    """To rounding: the log-sum-exp of the logits is about 4, where float32 has steps of 4.8e-7. The largest gradient with another teacher is above 0.01."""
    mesh = one_device()
    norms = []
    for teacher in ((CONFIG, PARAMS), (TEACHER_CONFIG, TEACHER)):
        updater, (first, _) = full(teacher, mesh, objective=nothing)
        _, metrics = updater.update(
            init_state(PARAMS, KEEP_GRADIENT, mesh), first, learning_rate=1.0, first=True
        )
        scalars = to_scalars(metrics)
        norms.append(scalars["update/grad_norm"])
        assert (abs(scalars["teacher/reverse_kl"]) < 1e-6) == (teacher[0] is CONFIG)
        assert (abs(scalars["update/loss"]) < 1e-6) == (teacher[0] is CONFIG)
    assert norms[0] < 1e-7 * norms[1]


# Slow: compiles an update. tests/dapo/logprobs_test.py compares the memory of the divergence for two numbers of tokens.
@pytest.mark.slow
def test_no_array_of_the_program_has_the_size_of_tokens_times_vocabulary():
    """Microbatches have 2 x 48 = 96 tokens, the vocabulary 20 entries in chunks of at most 8."""
    mesh = one_device()
    updater, _ = full((TEACHER_CONFIG, TEACHER), mesh)
    state = init_state(PARAMS, KEEP_GRADIENT, mesh)
    text = (
        updater.programs(state, capacity=4, rows=2, lengths=[48])["update_add_longest"]().compile().as_text()
    )
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([0-9,]+)\]", text)}
    assert (96, 5) in shapes or (96, 4) in shapes
    assert not [shape for shape in shapes if math.prod(shape) == 96 * 20 and 20 in shape]
