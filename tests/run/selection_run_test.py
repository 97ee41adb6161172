"""Runs that select tokens: the algorithms with a selection, for one step of two updates."""

import pytest

from dapo_jax.config import LossConfig
from dapo_jax.config.algorithms import ROWS


def loss_of(algorithm):
    row = {key.partition("."): value for key, value in ROWS[algorithm].items()}
    return LossConfig(**{name: value for (section, _, name), value in row.items() if section == "loss"})


SHARES = {
    # Of the n tokens in an update, 1 + floor(0.2 (n - 1)) are selected. An update has 8 to 48 tokens.
    "high_entropy": (0.2, 0.2 + 1 / 8),
    # 0.2% of n is less than one token, so one token is dropped if there is one in the range, and one is selected for KL-Cov.
    "clip_cov": (1 - 1 / 8, 1.0),
    "kl_cov": (1 / 48, 1 / 8),
    # In the first step, trainer and sampler have the same weights, and all log-ratios are rounding errors.
    "m2po": (1.0, 1.0),
}
"""Smallest and largest value of `policy/selected_frac` for each algorithm."""


@pytest.mark.parametrize(
    "algorithm",
    [
        "high_entropy",
        # Slow: a run each. tests/training/selection_test.py selects by covariance.
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("kl_cov", "clip_cov", "m2po")),
    ],
)
def test_a_step_with_each_selection(micro, run_micro, algorithm):
    low, high = SHARES[algorithm]
    [line] = run_micro(micro(steps=1, loss=loss_of(algorithm))).metrics
    assert low <= line["policy/selected_frac"] <= high
    assert line["update/skipped_frac"] == 0.0
    assert line["update/grad_norm"] > 0.0


def test_the_random_selection_depends_on_the_seed_alone(micro, run_micro, same_run):
    """The range is wide enough for many tokens, so that the draw matters."""
    wide = {"frac": 0.3, "low": -100.0, "high": 100.0}
    loss = LossConfig(select={"low_covariance": wide})
    first, second = (run_micro(micro(steps=2, loss=loss)) for _ in range(2))
    same_run(first, second)
    assert first.metrics[0]["policy/selected_frac"] == pytest.approx(0.7, abs=1 / 8)
