"""Each warning on sequences of metrics: when it is raised, when not, and which one of several."""

import json
from pathlib import Path

import pytest

from dapo_jax.health.watchdogs import NAMES, Watchdogs
from dapo_jax.trackers import read_metrics

ROOT = Path(__file__).parents[2]
RECORDED = {
    "quickstart": ROOT / "tests" / "golden" / "quickstart_metrics.jsonl",
    "smollm2": ROOT / "docs" / "results" / "smollm2_135m_arithmetic" / "metrics.jsonl",
}


def healthy(count=20, **series):
    """Steps of a run whose reward rises from -0.2 by 0.1 per step; `series` has one value, or a list with one per step."""
    steps = []
    for index in range(count):
        step = {
            "policy/entropy": 0.5,
            "reward/mean": -0.2 + 0.1 * index,
            "reward/std": 1.0,
            "rollout/accuracy": 0.5,
            "rollout/all_correct_frac": 0.1,
            "rollout/mixed_frac": 0.8,
            "rollout/prompts": 100,
            "rollout/response_tokens": 30.0,
            "rollout/truncated_frac": 0.1,
            "update/learning_rate": 1e-4,
        }
        for name, values in series.items():
            step[name.replace("__", "/")] = values[index] if isinstance(values, list) else values
        steps.append(step)
    return steps


def raised(steps, **limits):
    """Name and first step (from 1) of each warning, in order."""
    dogs, found = Watchdogs(**limits), []
    for number, step in enumerate(steps, start=1):
        flags, texts = dogs.step(step)
        found += [(next(name for name in NAMES if flags[f"watchdog/{name}"]), number) for _ in texts]
    return found


def test_a_run_that_learns_raises_nothing():
    assert raised(healthy()) == []


@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_healthy_runs_raise_nothing(name):
    """The quickstart (60 steps, rounded to five decimals) and a result in docs/. The entropy of the quickstart ends at a sixth of its start;
    the real model's ends at a hundredth, with a high accuracy."""
    steps = [line for line in read_metrics(RECORDED[name]) if line["step"]]
    assert len(steps) >= 20
    assert raised(steps) == []


def test_entropy_has_collapsed_below_both_limits_unless_accuracy_is_high():
    """From 0.4 to 0.03: below 0.05 and below 0.04 from the third such step, the 8th."""
    falls = [0.4] * 5 + [0.03] * 15
    assert raised(healthy(policy__entropy=falls)) == [("entropy_collapse", 8)]
    assert raised(healthy(policy__entropy=falls, rollout__accuracy=0.95)) == []
    assert raised(healthy(policy__entropy=[0.2] * 5 + [0.03] * 15)) == []  # above a tenth


def test_length_has_collapsed_below_a_third():
    assert raised(healthy(rollout__response_tokens=[30.0] * 5 + [9.0] * 15)) == [("length_collapse", 8)]
    assert raised(healthy(rollout__response_tokens=[30.0] * 5 + [11.0] * 15)) == []


def test_truncation_is_more_than_half_and_more_than_at_first():
    """The mean of 0.1, 0.7, 0.7 is exactly 0.5: not above."""
    assert raised(healthy(rollout__truncated_frac=[0.1] * 5 + [0.7] * 15)) == [("truncation", 8)]
    assert raised(healthy(rollout__truncated_frac=[0.6] * 5 + [0.7] * 15)) == []


def test_groups_are_flat_after_half_a_window():
    assert raised(healthy(rollout__mixed_frac=0.0, rollout__all_correct_frac=0.0)) == [("flat_groups", 5)]
    assert raised(healthy(rollout__mixed_frac=0.03)) == []


def test_with_the_metric_score_groups_are_flat_by_score():
    """All scores are above 0 and count as right; they differ in all groups, and later in none."""
    above = {"rollout__accuracy": 1.0, "rollout__all_correct_frac": 1.0, "rollout__mixed_frac": 0.0}
    assert raised(healthy(**above, rollout__scores_differ_frac=1.0), metric="score") == []
    steps = healthy(**above, rollout__scores_differ_frac=[1.0] * 10 + [0.0] * 10)
    assert raised(steps, metric="score") == [("flat_groups", 15)]


def test_flat_verdicts_whose_scores_differ_name_the_remedy():
    below = {"rollout__accuracy": 0.0, "rollout__all_correct_frac": 0.0, "rollout__mixed_frac": 0.0}
    dogs = Watchdogs()
    steps = healthy(**below, rollout__scores_differ_frac=0.9)
    [text] = [text for step in steps for text in dogs.step(step)[1]]
    assert "dynamic_sampling.metric=score" in text


def test_with_the_metric_score_accuracy_is_ignored():
    """Scores that are all above 0 give an accuracy of 1, although they could be higher."""
    above = {"rollout__accuracy": 1.0, "rollout__scores_differ_frac": 1.0}
    stuck, sure = (
        healthy(**above, reward__mean=0.3),
        healthy(**above, policy__entropy=[0.4] * 5 + [0.03] * 15),
    )
    assert raised(stuck) == raised(sure) == []
    assert raised(stuck, metric="score") == [("reward_stuck", 10)]
    assert raised(sure, metric="score") == [("entropy_collapse", 8)]


def test_a_reward_is_stuck_after_a_window_at_the_full_rate_without_a_rise_above_the_noise():
    """500 prompts in 5 steps: a standard error of 1 / sqrt(500) = 0.045 each, 0.063 for the difference."""
    assert raised(healthy(reward__mean=0.3)) == [("reward_stuck", 10)]
    rise = [0.3] * 5 + [0.42] * 15
    assert raised(healthy(reward__mean=rise)) == [("reward_stuck", 10)]  # by 0.12 < 2 x 0.063
    assert raised(healthy(reward__mean=[0.3] * 5 + [0.44] * 15)) == []
    warming = [1e-5 * step for step in range(1, 9)] + [1e-4] * 12
    assert raised(healthy(reward__mean=0.3, update__learning_rate=warming)) == [("reward_stuck", 18)]
    assert raised(healthy(reward__mean=0.95, rollout__accuracy=0.97)) == []


def test_a_reward_is_stuck_while_the_rate_decays_unless_it_falls_below_a_half():
    """Over the ten steps of a window, the rate falls to 0.95^9 = 0.63 or to 0.9^9 = 0.39."""
    slow, fast = ([1e-4 * factor**step for step in range(20)] for factor in (0.95, 0.9))
    assert raised(healthy(reward__mean=0.3, update__learning_rate=slow)) == [("reward_stuck", 10)]
    assert raised(healthy(reward__mean=0.3, update__learning_rate=fast)) == []


def test_a_sampler_of_another_scale_is_seen_on_either_side():
    for balance in (3.1, 0.32):
        assert raised(healthy(sync__sign_balance=balance)) == [("sampler_scale", 3)]
    for balance in (2.9, 0.35):
        assert raised(healthy(sync__sign_balance=balance)) == []


@pytest.mark.parametrize(("stale", "is_named"), [(0.0, False), (0.85, True)])
def test_the_warning_about_the_scale_names_stale_tokens_and_not_rounding(stale, is_named):
    """Rounding gives a balance near 1. A policy that changes fast since the tokens were sampled gives any balance."""
    dogs = Watchdogs()
    steps = healthy(sync__sign_balance=5.0, rollout__earlier_tokens_frac=stale)
    [text] = [text for step in steps for text in dogs.step(step)[1]]
    assert ("85% of the tokens are from earlier weights; lower optimizer.learning_rate" in text) == is_named
    assert "Run dapo-jax doctor" in text
    assert "compute_dtype" not in text


@pytest.mark.parametrize(
    ("name", "limit"), [("copies_z", 4.0), ("copies_frac", 0.01), ("verdict_lag_z", 5.0)]
)
def test_copies_are_seen_in_enough_groups(name, limit):
    """The mean of three steps is above the limit from the second step with 1.6 times the limit on: (0 + 1.6 + 1.6) / 3 = 1.07."""
    values = {f"rollout__{name}": [0.0] * 5 + [1.6 * limit] * 15}
    assert raised(healthy(**values)) == [("copies", 7)]
    assert raised(healthy(**values, rollout__prompts=15)) == []
    assert raised(healthy(**{f"rollout__{name}": 0.9 * limit})) == []


def test_of_several_only_the_cause_is_raised():
    """A policy without entropy has flat groups and a constant reward."""
    steps = healthy(
        policy__entropy=[0.5] * 3 + [0.001] * 17, rollout__mixed_frac=[0.8] * 3 + [0.0] * 17, reward__mean=0.3
    )
    assert raised(steps) == [("entropy_collapse", 6)]


def test_a_warning_is_raised_a_second_time_after_it_cleared():
    lengths = [30.0] * 5 + [5.0] * 5 + [30.0] * 5 + [5.0] * 5
    assert raised(healthy(rollout__response_tokens=lengths)) == [
        ("length_collapse", 8),
        ("length_collapse", 18),
    ]


def test_missing_values_do_not_count():
    steps = healthy(policy__entropy=[0.4] * 5 + [0.01] * 15)
    gaps = [
        {"update/learning_rate": 1e-4, "policy/entropy": None},
        {"update/learning_rate": 1e-4, "policy/entropy": float("nan")},
    ]
    assert raised([*steps[:6], *gaps, *steps[6:]]) == [("entropy_collapse", 10)]


def test_a_resumed_run_raises_the_warnings_of_an_uninterrupted_one():
    """From its lines, with an evaluation before the first step; and no warning that was raised before."""
    steps = healthy(policy__entropy=[0.4] * 5 + [0.01] * 15)
    for cut in (3, 7, 8, 12):
        lines = [{"step": 0, "eval/x/avg@8": 0.5}, *steps[:cut]]
        again = Watchdogs(history=json.loads(json.dumps(lines)))
        numbers = [number for number, step in enumerate(steps[cut:], start=cut + 1) if again.step(step)[1]]
        assert numbers == ([8] if cut < 8 else [])


def test_flat_groups_and_a_constant_reward_say_nothing_about_a_run_that_does_not_learn_rewards():
    """As in distillation with an environment, which judges each episode: `TrainConfig.learnt_metric` is empty."""
    flat = healthy(
        rollout__mixed_frac=0.0, rollout__scores_differ_frac=0.0, reward__mean=-1.0, rollout__accuracy=0.0
    )
    assert {name for name, _ in raised(flat)} == {"flat_groups"}
    assert {name for name, _ in raised(flat, metric="score")} == {"flat_groups"}
    assert {name for name, _ in raised(healthy(reward__mean=-1.0))} == {"reward_stuck"}
    assert raised(flat, metric="") == raised(healthy(reward__mean=-1.0), metric="") == []
