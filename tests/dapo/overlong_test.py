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
        (20481, -1.0),  # no further beyond it
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


def test_no_penalty_is_not_a_negative_zero():
    assert str(overlong_penalty(1, **PAPER)) == "0.0"


def test_a_numpy_count_is_one_length():
    assert type(overlong_penalty(np.int64(18432), **PAPER)) is float


def test_the_ramp_may_take_the_whole_length():
    assert overlong_penalty(25, max_response_tokens=100, buffer_tokens=100) == -0.25


@pytest.mark.parametrize("buffer_tokens", [0, -1, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer_tokens):
    with pytest.raises(ValueError, match=rf"buffer_tokens must be in .*\(0, 100\], got {buffer_tokens}"):
        overlong_penalty(5, max_response_tokens=100, buffer_tokens=buffer_tokens)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="response_tokens must be 0 or more, got -3"):
        overlong_penalty(np.array([5, -3]), **PAPER)


def test_a_negative_factor_is_refused():
    with pytest.raises(ValueError, match="penalty_factor must be 0 or more"):
        overlong_penalty(5, **PAPER, penalty_factor=-1.0)
