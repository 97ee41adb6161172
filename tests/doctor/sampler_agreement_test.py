"""Sampler and trainer may differ by what rounding explains, and by no more."""

import math

import pytest

from dapo_jax.doctor.sampler_agreement import agreement


@pytest.mark.parametrize(
    ("kl", "largest", "dtype", "platform", "state"),
    [
        (2e-9, 2e-6, "float32", "cpu", "ok"),  # the quickstart, as seen
        (1e-5, 1e-4, "float32", "cpu", "failed"),
        (1e-9, 2e-3, "float32", "cpu", "failed"),  # one token of many
        (1.7e-4, 0.1, "bfloat16", "tpu", "ok"),  # SmolLM2-135M with activations rounded, see docs/metrics.md
        (1e-5, 1e-2, "float32", "gpu", "ok"),  # its float32 products round their operands
        (5e-3, 0.1, "bfloat16", "tpu", "failed"),
        (math.nan, 0.0, "bfloat16", "cpu", "failed"),
        (0.0, math.nan, "bfloat16", "cpu", "failed"),
    ],
)
def test_what_rounding_explains_depends_on_the_dtype_and_the_device(kl, largest, dtype, platform, state):
    found = agreement(kl=kl, largest=largest, compute_dtype=dtype, platform=platform)
    assert found.state == state
    assert bool(found.remedy) == (state == "failed")


def test_the_limits_stand_beside_what_was_found_with_their_reason():
    said = agreement(kl=1e-4, largest=0.02, compute_dtype="bfloat16", platform="tpu").message
    assert said.startswith("KL 1.0e-04, largest difference of log-probabilities 2.0e-02 nats")
    assert said.endswith("bfloat16 operands explain up to 0.001 and 0.5")
