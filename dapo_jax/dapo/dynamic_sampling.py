"""Dynamic sampling (DAPO Eq. 11, Algorithm 1): which groups are informative, and a record of the groups in a step.

Groups are judged by their verdicts, before any reward shaping. A step trains on the first N informative groups in the order of their prompts' ordinals.
Training on the groups that finish first instead would favour short responses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dapo_jax.dapo.rollouts import Group


def is_informative(group: Group, *, metric: str = "correct") -> bool:
    """Returns whether the group's verdicts differ: 0 < #correct < G or, for `metric="score"`, the scores are not all equal.

    The decision uses verdicts, not rewards. The overlong penalty makes the rewards of an all-correct group unequal, and
    training on such a group would teach the model nothing but length.
    Raises ValueError if `metric` is "score", but a verdict that was not lost has no score."""
    if metric == "correct":
        return len({rollout.correct for rollout in group.rollouts}) == 2
    if not _is_scored(group):
        raise ValueError(
            "dynamic_sampling.metric=score needs a reward function that returns scores, but this one returned a verdict "
            "without a score. Return a number, or set dynamic_sampling.metric=correct"
        )
    return scores_differ(group)


def scores_differ(group: Group) -> bool:
    """Returns whether the group's scores are not all equal. False if a verdict that was not lost has no score."""
    return _is_scored(group) and len({rollout.verdict.score for rollout in group.rollouts}) > 1


def _is_scored(group: Group) -> bool:
    return all(rollout.verdict.score is not None or rollout.verdict.lost for rollout in group.rollouts)


@dataclass
class Tally:
    """Counts groups by their verdicts."""

    groups: int = 0
    correct: int = 0
    """Number of groups in which every response is correct."""
    wrong: int = 0
    """Number of groups in which every response is wrong."""
    differing: int = 0
    """Number of groups in which the scores differ, or 0 if the verdicts have no scores."""

    @property
    def mixed(self) -> int:
        """Number of groups with both correct and wrong responses."""
        return self.groups - self.correct - self.wrong

    def add(self, group: Group) -> None:
        """Adds one group to the counts."""
        self.groups += 1
        self.correct += group.accuracy == 1.0
        self.wrong += group.accuracy == 0.0
        self.differing += scores_differ(group)


class ShortfallError(RuntimeError):
    """Dynamic sampling reached its sampling limit before it found enough informative groups."""


REST_EPOCHS = 4
"""Number of epochs for which a solved row rests. Then it is sampled again, and the count of its visits begins at 0."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """Rows that rest after `visits` successive visits in which all responses were correct. Only past verdicts decide, so it is the same in every process."""

    visits: int = 0
    """If 0, no row rests."""
    rows: int = 1
    row_of: Callable[[int], int] = int
    """The number of rows, and a function from an ordinal to its row. Ordinal o is in epoch o // rows."""
    streaks: Mapping[int, int] = field(default_factory=dict)
    """Maps a row to the number of its latest successive visits that were solved, or to minus the last epoch in which it rests."""

    def awake(self, ordinal: int) -> int:
        """Returns the first ordinal, from `ordinal` on, whose row does not rest. Raises ShortfallError if no row is awake within an epoch."""
        for at in range(ordinal, ordinal + self.rows):
            if (streak := self.streaks.get(self.row_of(at), 0)) >= 0 or at // self.rows > -streak:
                return at
        raise ShortfallError(
            f"all {self.rows} rows rest after dynamic_sampling.skip_solved={self.visits} successive visits with only correct responses: use harder data, or raise the key"
        )

    def after(self, groups: Sequence[Group]) -> "Solved":
        """Returns the rows that rest after the visits `groups`, in the order of their ordinals. A truncated or lost response ends a streak."""
        streaks = dict(self.streaks)
        for group in groups if self.visits else ():
            row, epoch = self.row_of(group.prompt.ordinal), group.prompt.ordinal // self.rows
            streak = 1 + max(0, streaks.pop(row, 0))
            if all(one.correct and not one.truncated and not one.verdict.lost for one in group.rollouts):
                streaks[row] = -epoch - REST_EPOCHS if streak == self.visits else streak
        return replace(self, streaks=streaks)

    def resting_frac(self, ordinal: int) -> float:
        """Returns the share of rows that rest in the epoch of `ordinal`."""
        return sum(-streak >= max(1, ordinal // self.rows) for streak in self.streaks.values()) / self.rows


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The groups of one step."""

    groups: list[Group]
    """The groups to train on, in the order of their prompts' ordinals, without the responses that `Group.best` removed."""
    whole: list[Group] = field(default_factory=list)
    """The same groups with all their responses."""
    carry: list[Group]
    """Informative groups that are kept for the next step."""
    sampled: list[Group]
    """All groups that were graded in this step, in the order of their prompts' ordinals. Metrics computed from `sampled` are unbiased."""
    cursor: int
    """Ordinal of the first prompt for which no response has been started. The next step starts there."""
    waves: int
    surplus: int
    """Number of informative groups that the step did not need. They are carried or discarded."""
    version: int = 0
    """Version of the weights at the start of the step."""
    rounds: int = 0
    """Number of sampling rounds in this step, or 0 if the step samples in waves instead of keeping rollouts in flight."""
    drawn_tokens: int | None = None
    """Number of tokens sampled in this step if rollouts are kept in flight. If None (waves), the tokens in `sampled` are counted instead."""
    solved: Solved = field(default_factory=Solved)
    """The rows that rest after this step."""

    def logged(self, count: int) -> Sequence[Group]:
        """Returns the groups whose rollouts are logged: the first `count` sampled groups or, with rollouts in flight, the first `count` trained groups.
        With rollouts in flight, a group may be graded in this step but trained on in a later step, so `sampled` would not match the training data."""
        return (self.whole if self.drawn_tokens is not None else self.sampled)[:count]


def nothing_to_learn(tally: Tally, sampled: Sequence[Group], metric: str) -> str:
    """Explains why so few of the `sampled` groups are informative, and suggests a remedy. `tally` counts these groups."""
    if metric == "score":
        equal = [group.rollouts[0].verdict.score for group in sampled if not scores_differ(group)]
        scores = sorted({score for score in equal if score is not None})
        which = f" ({scores[0]:g}{f' to {scores[-1]:g}' if scores[1:] else ''})" if scores else ""
        return (
            f"of {tally.groups} groups, {tally.differing} had scores that differ, and {len(equal)} had one score for all responses{which}, "
            "so there is nothing to learn from them. The reward function may return the same score for every response, or the prompts may be "
            "too easy or too hard. Change the data or the reward function, raise batch.group_size"
        )
    flat = sum(scores_differ(group) and group.accuracy in (0.0, 1.0) for group in sampled)
    differ = (
        f" In {flat} of the all-correct and all-wrong groups the scores differ, because only a score above 0 is correct. If "
        "the reward is a number rather than a verdict, set dynamic_sampling.metric=score, which keeps these groups."
    )
    return (
        f"of {tally.groups} groups, {tally.correct} were all correct, {tally.wrong} all wrong, {tally.mixed} mixed."
        f"{differ if flat else ''} If most are all correct, the prompts are too easy. If most are all wrong, the prompts are "
        "too hard, or the grader recognizes no answer. Change the data or the grader"
    )
