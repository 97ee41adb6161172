"""Dynamic sampling: which groups carry a signal."""

import pytest

from dapo_jax.dapo.dynamic_sampling import is_informative
from tests.dapo.made import group_of, rollout_of


def make_group(verdicts, *, rewards=None, scores=None):
    """One rollout per character of `verdicts`: x is correct, ? is lost, anything else is wrong."""
    count = len(verdicts)
    each = zip(verdicts, scores or [None] * count, rewards or [0.0] * count, strict=True)
    return group_of(
        rollout_of(reward=reward, correct=mark == "x", score=score, lost="died" if mark == "?" else "")
        for mark, score, reward in each
    )


@pytest.mark.parametrize(
    ("verdicts", "rewards", "informative"),
    [
        ("xx", None, False),
        ("..", None, False),
        ("x.", None, True),
        (".x", None, True),
        ("x", None, False),
        # A correct answer with the whole penalty may have a wrong one's reward.
        ("x.", [-1.0, -1.0], True),
    ],
)
def test_a_group_is_informative_if_some_but_not_all_are_correct(verdicts, rewards, informative):
    assert is_informative(make_group(verdicts, rewards=rewards)) is informative


def test_the_overlong_penalty_does_not_make_a_group_informative():
    """All wrong, one of them 0.25 deep in the buffer: its advantages would be large, and about nothing but length."""
    assert not is_informative(make_group("....", rewards=[-1.0, -1.0, -1.0, -1.25]))
    assert not is_informative(make_group("xx", rewards=[1.0, 0.5]))


@pytest.mark.parametrize(
    ("verdicts", "scores", "informative"),
    [
        ("xx", [0.5, 0.7], True),
        ("xx", [0.5, 0.5], False),
        # A lost verdict counts as a worse one.
        ("xx?", [0.5, 0.5, None], True),
        ("??", [None, None], False),
    ],
)
def test_by_score_a_group_is_informative_if_its_scores_differ(verdicts, scores, informative):
    group = make_group(verdicts, scores=scores)
    assert is_informative(group, metric="score") is informative
    assert is_informative(group) is ("x" in verdicts and "?" in verdicts)


@pytest.mark.parametrize(("verdicts", "scores"), [("x.", [0.5, None]), ("?x", [None, None])])
def test_by_score_plain_verdicts_are_refused(verdicts, scores):
    with pytest.raises(ValueError, match=r"dynamic_sampling\.metric=score"):
        is_informative(make_group(verdicts, scores=scores), metric="score")
