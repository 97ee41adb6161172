"""The ratios in the rollout log are those that the updates clipped."""

import jax
import numpy as np
import pytest

from dapo_jax.dapo.batching import training_examples
from dapo_jax.run.observers import ratios_of, responses_in
from dapo_jax.trackers.rollout_log import read_rollouts
from dapo_jax.training.row_packing import pack
from tests.run.conftest import make_group

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


def test_equal_tokens_that_were_sampled_with_different_weights_have_their_own_ratios():
    """The second response differs from the first in the sampler's log-probabilities alone."""
    group = make_group(0, "xx", [2, 2])
    for index, rollout in enumerate(group.rollouts):
        rollout.response.tokens[:] = (5, 2)
        rollout.response.logprobs[:] = -1.0 - index
    examples = training_examples([group], [[1.0, -1.0]])
    [packed] = pack(examples, np.ones(2), row_tokens=16, rows_per_microbatch=1)
    stack = jax.tree.map(lambda array: array[None], packed)
    by_response = dict(responses_in(stack, stack.sampler_logprobs * 10))
    ratios = [ratios_of(group, rollout, by_response) for rollout in group.rollouts]
    np.testing.assert_array_equal(ratios, [[-10.0, -10.0], [-20.0, -20.0]])


def test_writing_rollouts_changes_nothing_of_the_run(micro, run_micro, logged, same_run):
    same_run(run_micro(micro(**SETTINGS)), logged)
