"""Dynamic sampling (DAPO Eq. 11, Algorithm 1): which groups are informative, and the groups of a step.

The host decides by verdicts before any shaping, and by ordinals: a step trains on the first N informative groups by ordinal, in whatever order they
ended. Taking groups as they end would favour short responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_jax.dapo.rollouts import Group


def is_informative(group: Group, *, metric: str = "correct") -> bool:
    """Returns whether the group's responses differ: 0 < #correct < G, or for graded scores, not all equal.

    Decided on the verdict, not on the reward: the overlong penalty gives an all-correct group unequal rewards, and
    training on it would teach length and nothing else.

    Raises:
        ValueError: `metric` is score and a verdict that was not lost has none.
    """
    if metric == "correct":
        return len({rollout.correct for rollout in group.rollouts}) == 2
    if not _is_scored(group):
        raise ValueError(
            "dynamic_sampling.metric=score needs a reward function that returns scores; this one returned a plain "
            "verdict: return a number, or set dynamic_sampling.metric=correct"
        )
    return scores_differ(group)


def scores_differ(group: Group) -> bool:
    """Returns whether the verdicts of the group, except lost ones, have scores, and these are not all equal."""
    return _is_scored(group) and len({rollout.verdict.score for rollout in group.rollouts}) > 1


def _is_scored(group: Group) -> bool:
    return all(rollout.verdict.score is not None or rollout.verdict.lost for rollout in group.rollouts)


@dataclass
class Tally:
    """Counts of groups by kind."""

    groups: int = 0
    correct: int = 0
    """Groups in which all responses are correct."""
    wrong: int = 0
    """Groups in which all responses are wrong."""
    differing: int = 0
    """Groups in which the scores differ; 0 if verdicts have no scores."""
    flat_differing: int = 0
    """Number of these groups that are all correct or all wrong."""

    @property
    def mixed(self) -> int:
        """Groups with both correct and wrong responses."""
        return self.groups - self.correct - self.wrong

    def add(self, group: Group) -> None:
        """Counts one more group."""
        differs, flat = scores_differ(group), group.accuracy in (0.0, 1.0)
        self.groups += 1
        self.correct += group.accuracy == 1.0
        self.wrong += group.accuracy == 0.0
        self.differing += differs
        self.flat_differing += differs and flat


class ShortfallError(RuntimeError):
    """Dynamic sampling used up its waves without finding enough informative groups."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The groups of one step."""

    groups: list[Group]
    """The groups to train on, by ordinal."""
    carry: list[Group]
    """Informative groups that stay ready for the next step."""
    sampled: list[Group]
    """All groups whose verdicts came in this step, by ordinal; unbiased metrics are computed from them."""
    cursor: int
    """The ordinal that the next step begins with."""
    waves: int
    surplus: int
    """Number of informative groups beyond those needed: carried or discarded."""
    version: int = 0
    """Version of the weights when the step began."""
    rounds: int = 0
    """Number of rounds, with rollouts in flight; there are no waves then."""
    drawn_tokens: int | None = None
    """Number of tokens sampled in this step, with rollouts in flight. None: the tokens of `sampled`."""

    def logged(self, count: int) -> Sequence[Group]:
        """Returns the groups whose rollouts are written: the first that were sampled. With rollouts in flight, the first that are trained on,
        since a group whose verdict came in this step may be trained on in a later one."""
        return (self.groups if self.drawn_tokens is not None else self.sampled)[:count]


def nothing_to_learn(tally: Tally, sampled: Sequence[Group], metric: str) -> str:
    """Returns why so few of the groups `sampled`, which `tally` has counted, are informative, and the remedy."""
    if metric == "score":
        equal = [group.rollouts[0].verdict.score for group in sampled if not scores_differ(group)]
        scores = sorted({score for score in equal if score is not None})
        which = f" ({scores[0]:g}{f' to {scores[-1]:g}' if scores[1:] else ''})" if scores else ""
        return (
            f"of {tally.groups} groups {tally.differing} had scores that differ, {len(equal)} one score for all responses{which}, which "
            "teaches nothing. The reward function may give every response the same score, or the prompts may be too easy or too hard for "
            "it to distinguish responses. Change the data or the function, raise batch.group_size"
        )
    differ = (
        f" In {tally.flat_differing} of these the scores differ, and only scores above 0 count as correct: if the reward is a number "
        "rather than a verdict, set dynamic_sampling.metric=score, which keeps them."
    )
    return (
        f"of {tally.groups} groups {tally.correct} were all correct, {tally.wrong} all wrong, {tally.mixed} mixed."
        f"{differ if tally.flat_differing else ''} All correct: the prompts are too easy. All wrong: they are too hard, or the grader "
        "never matches. Change the data or the grader"
    )
