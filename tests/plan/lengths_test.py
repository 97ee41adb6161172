"""Assumed lengths and verdicts."""

import numpy as np
import pytest

from dapo_jax.plan.lengths import Responses, log_normal


def test_without_a_spread_all_are_as_long_as_the_mean():
    assert (log_normal(mean=10.4, std=0.0, limit=48, samples=3)(0, 5) == 10).all()
    assert (log_normal(mean=48, std=9.0, limit=48, samples=3)(0, 5) == 48).all()


@pytest.mark.parametrize(("mean", "std", "limit"), [(5000, 4000, 20480), (300, 200, 1024), (900, 900, 1024)])
def test_the_mean_is_the_one_that_is_assumed_with_the_cut(mean, std, limit):
    """Of 262,144 lengths the mean has a standard deviation of less than std / 512."""
    drawn = log_normal(mean=mean, std=std, limit=limit, samples=256)(0, 1024)
    assert drawn.min() >= 1
    assert drawn.max() == limit
    assert drawn.mean() == pytest.approx(mean, abs=4 * std / 512)


def test_without_a_cut_the_spread_is_the_one_that_is_assumed():
    """Log-normal: the logarithms have the variance ln(1 + (std / mean)^2) = ln 1.25."""
    logs = np.log(log_normal(mean=1e6, std=5e5, limit=10**9, samples=256)(0, 1024))
    assert logs.var() == pytest.approx(np.log(1.25), rel=0.02)


def test_a_response_is_as_long_whenever_it_is_asked_for():
    """Chunks of 1,024 groups, drawn as they are needed."""
    late, early = (
        Responses(log_normal(mean=50, std=30, limit=99, samples=4), informative=0.5) for _ in range(2)
    )
    both = late.lengths([5000, 3])
    assert (both[1] == early.lengths([3])[0]).all()
    assert (both[0] == early.lengths([5000])[0]).all()
    assert (both[0] != both[1]).any()
    assert late.lengths([]).shape == (0, 4)


@pytest.mark.parametrize("share", [1 / 3, 0.5, 0.7, 1.0])
def test_informative_groups_are_spread_evenly(share):
    responses = Responses(log_normal(mean=1, std=0, limit=1, samples=2), informative=share)
    counts = np.cumsum([responses.informative(ordinal) for ordinal in range(300)])
    assert (counts == np.floor(np.arange(1, 301) * share + 1e-6)).all()
