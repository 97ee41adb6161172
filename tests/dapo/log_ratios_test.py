"""KL estimates of small differences, compared with float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.dapo.log_ratios import k3
from dapo_jax.dapo.losses import dapo_loss, kl_penalty
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.training.sync_metrics import mismatch_metrics

DRAWS = 20_000
SMALL = np.random.default_rng(0).normal(0.0, 1e-5, (8, DRAWS // 8)).astype(np.float32)
"""Log-probabilities of 1e-5 nats. The other policy's are 0, so that their difference in float32 is exact."""
ZERO, MASK = jnp.zeros(SMALL.shape, jnp.float32), jnp.ones(SMALL.shape, bool)
EXPECTED = float(np.mean(np.expm1(np.float64(SMALL)) - np.float64(SMALL)))
"""Half the variance, 5e-11; the relative error of `expm1` in float64 is 1e-16 / 1e-5."""


def old_policy():
    """KL(old || new) of a token that the old policy sampled: d is new - old."""
    _, metrics = jax.jit(dapo_loss)(jnp.asarray(SMALL), ZERO, jnp.ones(8), MASK)
    return to_scalars(metrics)["policy/kl_old_k3"]


def reference():
    """KL(new || reference): d is reference - new."""
    _, metrics = jax.jit(kl_penalty)(ZERO, jnp.asarray(SMALL), MASK)
    return to_scalars(metrics)["policy/kl_ref_k3"]


def penalty():
    """KL(new || reference) as a loss."""
    return float(jax.jit(kl_penalty)(ZERO, jnp.asarray(SMALL), MASK)[0])


def sampler():
    """KL(sampler || trainer): d is trainer - sampler."""
    metrics = jax.jit(mismatch_metrics)(jnp.asarray(SMALL), ZERO, MASK)
    return to_scalars(metrics)["sync/sampler_trainer_kl"]


@pytest.mark.parametrize("shown", [old_policy, reference, penalty, sampler])
def test_a_kl_of_differences_of_1e_5_is_within_a_hundredth_of_float64(shown):
    """The plain formula, exp(d) - 1 - d in float32, has steps of 6e-8; the value is 5e-11."""
    assert shown() == pytest.approx(EXPECTED, rel=0.01)


def test_it_is_never_negative():
    """For a sample of all float32 numbers from 2^-60 to 16 with either sign."""
    lowest = jax.jit(lambda x: k3(x).min())
    for exponent in range(-60, 4):
        mantissas = np.arange(0, 1 << 23, 997, dtype=np.uint32)
        numbers = ((np.uint32(exponent + 127) << np.uint32(23)) | mantissas).view(np.float32)
        assert lowest(numbers) >= 0
        assert lowest(-numbers) >= 0
