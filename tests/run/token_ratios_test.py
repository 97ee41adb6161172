"""The ratios in the rollout log are those that the updates clipped."""

import numpy as np
import pytest

from dapo_jax.trackers.rollout_log import read_rollouts

LOW, HIGH = 0.2, 0.28
"""The defaults of loss.clip_ratio_low and loss.clip_ratio_high."""
SETTINGS = {"dynamic_sampling__surplus": "discard", "reward__overlong__filter_truncated": True}


@pytest.fixture(scope="module")
def logged(micro, run_micro):
    """A run with two updates per step, the second of them clipped; the first four groups of each step are written."""
    return run_micro(micro(log__rollouts_every_steps=1, **SETTINGS))


@pytest.fixture(scope="module")
def steps(logged):
    """Each step's metrics and the lines of its rollouts."""
    folder = logged.run_dir / "rollouts"
    return [(line, read_rollouts(folder / f"step_{line['step']:06d}.jsonl")) for line in logged.metrics]


def test_clip_fractions_and_the_largest_ratio_can_be_computed_from_the_rollouts(steps):
    clipped = 0.0
    for metrics, rollouts in steps:
        trained = [row for row in rollouts if row["in_loss"]]
        ratios = np.concatenate([row["ratios"] for row in trained])
        signs = np.concatenate([np.full(len(row["ratios"]), np.sign(row["advantage"])) for row in trained])
        assert np.mean((signs > 0) & (ratios > 1 + HIGH)) == pytest.approx(metrics["policy/clip_high_frac"])
        assert np.mean((signs < 0) & (ratios < 1 - LOW)) == pytest.approx(metrics["policy/clip_low_frac"])
        # Written with six decimals; the two passes round alike to 1e-5.
        assert ratios.max() == pytest.approx(metrics["policy/ratio_max"], rel=2e-5)
        clipped += metrics["policy/clip_high_frac"] + metrics["policy/clip_low_frac"]
    assert clipped > 0


def test_the_first_update_of_a_step_takes_every_token_at_ratio_1_and_the_second_does_not(steps):
    """Of steps whose updates both have responses in the loss; overlong filtering may leave one without."""
    both = 0
    for _, rollouts in steps:
        trained = {row["ordinal"]: set() for row in rollouts if row["in_loss"]}
        for row in rollouts:
            if row["in_loss"]:
                trained[row["ordinal"]] |= set(row["ratios"])
        assert {1.0} in trained.values()
        if len(trained) == 2:
            both += 1
            assert sum(ratios == {1.0} for ratios in trained.values()) == 1
    assert both


def by_group(rollouts):
    groups: dict[int, list[dict]] = {}
    for row in rollouts:
        groups.setdefault(row["ordinal"], []).append(row)
    return list(groups.values())


def test_responses_outside_the_loss_have_no_ratios(steps):
    for metrics, rollouts in steps:
        trained = [rows for rows in by_group(rollouts) if rows[0]["in_loss"] is not None]
        assert len(trained) == metrics["rollout/trained_groups"]
        for rows in by_group(rollouts):
            for row in rows:
                if rows in trained:
                    assert row["in_loss"] == (row["finish_reason"] != "length")
                assert (row["ratios"] is not None) == bool(row["in_loss"])
                assert row["ratios"] is None or len(row["ratios"]) == row["response_tokens"]


def test_advantages_of_trained_groups_are_written_and_sum_to_nothing(steps):
    for _, rollouts in steps:
        for rows in by_group(rollouts):
            if rows[0]["in_loss"] is None:
                assert [row["advantage"] for row in rows] == [None] * len(rows)
                continue
            assert sum(row["advantage"] for row in rows) == pytest.approx(0.0, abs=1e-5)
            best = max(rows, key=lambda row: row["reward"])
            assert best["advantage"] == max(row["advantage"] for row in rows)


def test_writing_rollouts_changes_nothing_of_the_run(micro, run_micro, logged, same_run):
    same_run(run_micro(micro(**SETTINGS)), logged)
