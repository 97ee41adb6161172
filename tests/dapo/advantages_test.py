"""`group_advantages`: Eq. 9 by hand, and the rounding errors that float64 avoids."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax import group_advantages

# A multiple of 1/8 up to 2^10 in size is exact in every dtype used here, and so are sums of a few.
exact_rewards = st.lists(st.integers(-8192, 8192), min_size=2, max_size=16).map(
    lambda xs: np.array([xs]) / 8.0
)


def test_two_of_four_by_hand():
    """Rewards 1, 1, -1, -1: mean 0, variance 4 / 3 with ddof = 1, so +-1 / (sqrt(4 / 3) + 1e-6)."""
    expected = 1.0 / (math.sqrt(4 / 3) + 1e-6)
    advantages = group_advantages(np.array([[1.0, 1.0, -1.0, -1.0]]))
    np.testing.assert_allclose(advantages, [[expected, expected, -expected, -expected]], rtol=1e-14)
    assert advantages.dtype == np.float64


def test_one_right_answer_in_sixteen():
    """Mean -7/8, deviations 15/8 and -1/8, variance (225 + 15) / 64 / 15 = 1/4: 3.75 and -0.25, less eps."""
    advantages = group_advantages(np.array([[1.0] + [-1.0] * 15]))
    np.testing.assert_allclose(advantages[0, :2], [1.875 / (0.5 + 1e-6), -0.125 / (0.5 + 1e-6)], rtol=1e-14)


def test_eps_is_added_to_the_standard_deviation():
    """Rewards 1 and -1: standard deviation sqrt(2), so 1 / (sqrt(2) + 1)."""
    advantages = group_advantages(np.array([[1.0, -1.0]]), eps=1.0)
    np.testing.assert_allclose(advantages[0, 0], 1.0 / (math.sqrt(2) + 1.0), rtol=1e-14)


def test_a_group_of_one_has_mean_zero_and_std_one():
    np.testing.assert_allclose(
        group_advantages(np.array([[2.0], [-1.0]])), np.array([[2.0], [-1.0]]) / (1 + 1e-6)
    )
    np.testing.assert_array_equal(group_advantages(np.array([[2.0]]), normalize_std=False), [[2.0]])


@pytest.mark.parametrize("group", [2, 7, 16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reward", [0.1, -1.0 / 3.0, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(group, dtype, reward):
    rewards = np.full((2, group), reward, dtype)
    for normalize_std in (True, False):
        np.testing.assert_array_equal(
            group_advantages(rewards, normalize_std=normalize_std), np.zeros((2, group))
        )


def test_float32_arithmetic_would_make_advantages_of_equal_rewards():
    """A float32 mean of seven rewards of 0.1 is not 0.1, and the standard deviation is as small as the error."""
    rewards = np.full((1, 7), 0.1, np.float32)
    centered = rewards - rewards.mean(axis=1, keepdims=True, dtype=np.float32)
    in_float32 = centered / (rewards.std(axis=1, ddof=1, keepdims=True) + np.float32(1e-6))
    assert np.abs(in_float32).max() > 1e-3
    np.testing.assert_array_equal(group_advantages(rewards), np.zeros((1, 7)))


@given(rewards=exact_rewards, shift=st.integers(-64, 64))
def test_shifting_a_groups_rewards_changes_nothing(rewards, shift):
    np.testing.assert_array_equal(group_advantages(rewards + shift), group_advantages(rewards))


@given(rewards=exact_rewards, seed=st.integers(0, 2**32 - 1))
def test_permuting_a_group_permutes_its_advantages(rewards, seed):
    order = np.random.default_rng(seed).permutation(rewards.shape[1])
    np.testing.assert_allclose(
        group_advantages(rewards[:, order]), group_advantages(rewards)[:, order], rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("kind", [np.float32, jnp.asarray, np.ndarray.tolist])
def test_rewards_may_be_any_array(kind):
    rewards = np.array([[1.0, -1.0, 0.5], [0.25, 1.0, 1.0]])
    np.testing.assert_array_equal(group_advantages(kind(rewards)), group_advantages(rewards))


@pytest.mark.parametrize(
    ("rewards", "eps", "words"),
    [
        (
            np.where(np.arange(32).reshape(4, 8) == 31, np.nan, 0.0),
            1e-6,
            r"rewards\[3, 7\] is nan, the first of 1",
        ),
        (np.zeros(4), 1e-6, r"\[prompts, group\]"),
        (np.zeros((3, 0)), 1e-6, r"\[prompts, group\]"),
        (np.zeros((1, 2)), 0.0, "eps must be positive, got 0"),
    ],
)
def test_rewards_without_an_advantage_are_refused(rewards, eps, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(rewards, eps=eps)
