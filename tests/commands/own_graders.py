"""Reward functions that workers load. Each new worker imports this file, so it imports little."""

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards import whole_group


def long_ones(sample):
    """A reward function that reads fields of a saved rollout."""
    assert sample.prompt.row["level"] == 2
    assert (sample.finish_reason, sample.response_tokens) == ("stop", 3)
    return len(sample.response) > len("Answer: 34")


def too_slow(sample):
    """No response gets a verdict."""
    return Verdict(correct=False, lost="timeout")


def brief(sample):
    """A number of 0 or less: -1 for ten characters."""
    return -len(sample.response) / 10


@whole_group
def longest(group):
    """The longest response of a group of four is right; each step has one group."""
    assert len(group) == 4
    most = max(len(sample.response) for sample in group)
    return [len(sample.response) == most for sample in group]
