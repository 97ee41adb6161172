"""Rotary frequencies against numbers computed by hand."""

import math

import numpy as np
import pytest

from dapo_jax.models.rope import RopeScaling, rope_frequencies


def test_plain_frequencies_are_powers_of_theta():
    np.testing.assert_allclose(rope_frequencies(8, 10_000.0, None), [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_slows_every_rotation():
    scaling = RopeScaling(kind="linear", factor=4.0)
    np.testing.assert_allclose(
        rope_frequencies(8, 10_000.0, scaling), [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6
    )
    assert scaling.amplitude == 1.0


def test_llama3_scaling_keeps_the_fast_slows_the_slow_and_blends_between():
    """theta 100: 1, 10^-1/2, 10^-1, 10^-3/2 rad; in 32 positions 5.09, 1.61, 0.51, 0.16 turns. Above 4 turns, a frequency is
    kept; below 1, it is divided by 8. At 1.61 turns, the share (1.61 - 1) / 3 is kept and the rest is divided."""
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_positions=32)
    second = 10**-0.5
    kept = (32 * second / (2 * math.pi) - 1.0) / 3.0
    expected = [1.0, second * (kept + (1.0 - kept) / 8.0), 0.1 / 8.0, 10**-1.5 / 8.0]
    np.testing.assert_allclose(rope_frequencies(8, 100.0, scaling), expected, rtol=1e-6)


def test_yarn_blends_linearly_over_the_pairs_between_two_numbers_of_turns():
    """theta 100 and 64 positions: pair i turns 64 x 100^(-i/4) / 2 pi = 10.2, 3.2, 1.02, 0.32 times. Pair
    4 ln(64 / 2 pi) / ln 100 = 2.02 would turn once: rounded up, pair 3. No pair turns 32 times, so the ramp begins at 0."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=64)
    plain = np.array([1.0, 10**-0.5, 0.1, 10**-1.5])
    share = np.array([1.0, 2 / 3, 1 / 3, 0.0])
    expected = plain * (share + (1 - share) / 4.0)
    np.testing.assert_allclose(rope_frequencies(8, 100.0, scaling), expected, rtol=1e-6)


@pytest.mark.parametrize(("given", "expected"), [(None, 0.1 * math.log(4.0) + 1.0), (0.7, 0.7)])
def test_yarn_scales_cosine_and_sine(given, expected):
    assert RopeScaling(kind="yarn", factor=4.0, attention_factor=given).amplitude == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.5}, r"factor=0\.5 .* at least 1"),
        ({"original_max_positions": 0}, "original_max_positions=0 .* at least 1"),
        ({"low_freq_factor": 4.0}, r"low_freq_factor=4\.0 must be below high_freq_factor=4\.0"),
    ],
)
def test_impossible_scalings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**{"kind": "llama3", "factor": 4.0, **fields})
