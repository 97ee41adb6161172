"""Grading in worker processes, in a run: nothing that is learnt depends on when a verdict comes."""

import time
from pathlib import Path

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.run.assembly import Run

HERE = Path(__file__)


def sum_of_fours(sample):
    """Right for about a quarter of the responses, so that a third of the groups of four is flat."""
    return int(sample.tokens.sum()) % 4 == 0


def late_sum_of_fours(sample):
    """The same, after the sampler has run out of work."""
    time.sleep(0.05)
    return sum_of_fours(sample)


def hangs_on_the_first_prompt(sample):
    if sample.prompt.ordinal == 0 and sample.finish_reason:
        time.sleep(60)
    return int(sample.tokens.sum()) % 2 == 0


def test_a_run_graded_by_workers_is_the_run_graded_in_this_process(micro, run_micro, same_run):
    # Two prompts a wave for two groups a step: a second wave is opened only by a verdict.
    waves = {"dynamic_sampling__prompts_per_wave": 2}
    here = run_micro(micro(**waves), reward=sum_of_fours)
    assert max(line["rollout/waves"] for line in here.metrics) > 1
    config = micro(reward__grader=f"{HERE}:late_sum_of_fours", reward__workers=2, **waves)
    there = run_micro(config, reward=None)
    same_run(there, here)


def test_responses_without_a_verdict_count_as_wrong_and_are_logged(micro, run_micro):
    grader = f"{HERE}:hangs_on_the_first_prompt"
    config = micro(
        steps=1, reward__grader=grader, reward__timeout_s=0.5, dynamic_sampling__on_shortfall="train_fewer"
    )
    line = run_micro(config, reward=None).metrics[-1]
    assert line["reward/lost"] == config.batch.group_size
    assert line["rollout/all_wrong_frac"] > 0


def test_a_grader_that_cannot_be_loaded_stops_before_anything_starts(micro, rows):
    with pytest.raises(
        ConfigError, match=r"reward\.grader: .* has no 'late_sum'; did you mean 'late_sum_of_fours'"
    ):
        Run(micro(reward__grader=f"{HERE}:late_sum"), prompts=rows)
