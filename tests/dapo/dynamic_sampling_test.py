"""Dynamic sampling: which groups carry a signal."""

from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.dapo.dynamic_sampling import is_informative
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Span, Verdict

RIGHT, WRONG, MIXED = "xx", "..", "x."


def make_group(ordinal, verdicts, *, rewards=None, scores=None, version=0):
    """One rollout per character of `verdicts`: x is correct, anything else is wrong."""
    count = len(verdicts)
    scores = scores or [None] * count
    rewards = rewards or [1.0 if mark == "x" else -1.0 for mark in verdicts]
    response = Response(
        tokens=np.array([1], np.int32),
        logprobs=np.zeros(1, np.float32),
        finish_reason="stop",
        spans=(Span(0, version),),
    )
    rollouts = tuple(
        Rollout(response=response, text="", verdict=Verdict(correct=mark == "x", score=score), reward=reward)
        for mark, score, reward in zip(verdicts, scores, rewards, strict=True)
    )
    prompt = Prompt(ordinal=ordinal, tokens=np.array([2], np.int32), text="?", answer="!")
    return Group(prompt=prompt, rollouts=rollouts)


@pytest.mark.parametrize(
    ("verdicts", "informative"), [("xx", False), ("..", False), ("x.", True), (".x", True), ("x", False)]
)
def test_a_group_is_informative_if_some_but_not_all_are_correct(verdicts, informative):
    assert is_informative(make_group(0, verdicts)) is informative


def make_lost(group, index):
    """The group, with the verdict of one rollout lost."""
    rollouts = list(group.rollouts)
    rollouts[index] = replace(rollouts[index], verdict=Verdict(correct=False, lost="died"))
    return replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize(
    ("scores", "informative"),
    [([0.5, 0.5, 0.5], True), ([0.5, 0.25, 0.5], True)],
)
def test_by_score_a_lost_verdict_counts_as_a_worse_one(scores, informative):
    group = make_lost(make_group(0, "xxx", scores=scores), 2)
    assert is_informative(group, metric="score") is informative


def test_by_score_a_group_with_no_verdict_at_all_is_not_informative():
    group = make_lost(make_lost(make_group(0, "xx", scores=[1.0, 2.0]), 0), 1)
    assert not is_informative(group, metric="score")


def test_by_score_a_plain_verdict_beside_a_lost_one_is_still_refused():
    with pytest.raises(ValueError, match="needs a reward function that returns scores"):
        is_informative(make_lost(make_group(0, "xx"), 0), metric="score")


def test_the_overlong_penalty_does_not_make_a_group_informative():
    """All wrong, one of them 0.25 deep in the buffer: its advantages would be large, and about nothing but length."""
    assert not is_informative(make_group(0, "....", rewards=[-1.0, -1.0, -1.0, -1.25]))
    assert not is_informative(make_group(0, "xx", rewards=[1.0, 0.5]))


def test_a_mixed_group_of_equal_rewards_is_informative():
    """Decided on the verdict: a correct answer with the whole penalty may have a wrong one's reward."""
    assert is_informative(make_group(0, "x.", rewards=[-1.0, -1.0]))


def test_graded_scores_are_informative_when_they_differ():
    assert is_informative(make_group(0, "xx", scores=[0.5, 0.7]), metric="score")
    assert not is_informative(make_group(0, "xx", scores=[0.5, 0.5]), metric="score")
    assert not is_informative(make_group(0, "xx", scores=[0.5, 0.7]), metric="correct")


def test_filtering_by_score_refuses_plain_verdicts():
    with pytest.raises(ValueError, match=r"dynamic_sampling\.metric=score needs a reward function"):
        is_informative(make_group(0, "x.", scores=[0.5, None]), metric="score")
