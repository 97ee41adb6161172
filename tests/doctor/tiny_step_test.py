"""Sampler and trainer may differ by rounding, and by no more."""

import math

import pytest

from dapo_jax.doctor.tiny_step import agreement


@pytest.mark.parametrize(
    ("kl", "largest", "dtype", "platform", "state"),
    [
        (2e-9, 2e-6, "float32", "cpu", "ok"),  # measured with the quickstart
        (1e-5, 1e-4, "float32", "cpu", "failed"),
        (1e-9, 2e-3, "float32", "cpu", "failed"),  # one token of many
        (1.7e-4, 0.1, "bfloat16", "tpu", "ok"),  # SmolLM2-135M with rounded activations, see docs/metrics.md
        (1e-5, 1e-2, "float32", "gpu", "ok"),  # its float32 products round their operands
        (5e-3, 0.1, "bfloat16", "tpu", "failed"),
        (math.nan, 0.0, "bfloat16", "cpu", "failed"),
        (0.0, math.nan, "bfloat16", "cpu", "failed"),
    ],
)
def test_the_limits_depend_on_dtype_and_platform(kl, largest, dtype, platform, state):
    found = agreement(kl=kl, largest=largest, compute_dtype=dtype, platform=platform)
    assert found.state == state
    assert bool(found.remedy) == (state == "failed")
    assert found.message.startswith(
        f"KL {kl:.1e}, largest difference of log-probabilities {largest:.1e} nats"
    )
