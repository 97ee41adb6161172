"""`overlong_penalty`: the three branches of Eq. 13, and invalid lengths."""

import numpy as np
import pytest

from dapo_jax.dapo.overlong import overlong_penalty

PAPER = {"max_response_tokens": 20480, "buffer_tokens": 4096}
"""Section 4.1: 16,384 tokens are free, the ramp takes 4,096 more."""


@pytest.mark.parametrize(
    ("response_tokens", "expected"),
    [
        (0, 0.0),
        (16384, 0.0),  # the last free token
        (16385, -1 / 4096),  # the first that costs
        (16500, -116 / 4096),
        (18432, -0.5),  # half-way through the buffer
        (20480, -1.0),  # the limit
        (10**9, -1.0),
    ],
)
def test_each_branch_of_the_penalty(response_tokens, expected):
    penalty = overlong_penalty(response_tokens, **PAPER)
    assert penalty == pytest.approx(expected, rel=1e-12)
    assert type(penalty) is float


def test_the_factor_scales_the_whole_penalty():
    assert overlong_penalty(18432, **PAPER, penalty_factor=0.5) == -0.25
    assert overlong_penalty(30000, **PAPER, penalty_factor=2.0) == -2.0
    assert overlong_penalty(30000, **PAPER, penalty_factor=0.0) == 0.0


def test_an_array_of_lengths_gives_an_array_of_penalties():
    penalties = overlong_penalty(np.array([[80, 90], [100, 101]]), max_response_tokens=100, buffer_tokens=20)
    assert penalties.dtype == np.float64
    np.testing.assert_array_equal(penalties, [[0.0, -0.5], [-1.0, -1.0]])


def test_a_penalty_is_a_plain_number():
    assert str(overlong_penalty(1, **PAPER)) == "0.0", "not a negative zero"
    assert type(overlong_penalty(np.int64(18432), **PAPER)) is float
    assert overlong_penalty(25, max_response_tokens=100, buffer_tokens=100) == -0.25


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"buffer_tokens": 0}, "buffer_tokens .* got 0"),
        ({"buffer_tokens": 20481}, "buffer_tokens .* got 20481"),
        ({"penalty_factor": -1.0}, "penalty_factor .* got -1"),
    ],
)
def test_impossible_lengths_and_factors_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        overlong_penalty(**{"response_tokens": 5, **PAPER, **arguments})
