"""Dynamic sampling (DAPO Eq. 11, Algorithm 1): keep drawing prompts until enough groups carry a signal.

Decided on the host, on verdicts before any shaping, and by ordinals alone: the trained set is the first N informative groups by
ordinal, whatever order they ended in. Taking them as they end would favour short responses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dapo_jax.dapo.in_flight import InFlight
from dapo_jax.dapo.rollouts import Group


def is_informative(group: Group, *, metric: str = "correct") -> bool:
    """True if the group's responses differ: 0 < #correct < G, or for graded scores, not all equal.

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
    """True if the verdicts of the group have scores, lost ones aside, and these are not all equal."""
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
    """Groups in which the scores differ; 0 where verdicts have none."""
    flat_differing: int = 0
    """The number of these that are all correct or all wrong."""

    @property
    def mixed(self) -> int:
        """Groups with both correct and wrong responses."""
        return self.groups - self.correct - self.wrong

    def add(self, group: Group) -> None:
        """Counts one more."""
        differs, flat = scores_differ(group), group.accuracy in (0.0, 1.0)
        self.groups += 1
        self.correct += group.accuracy == 1.0
        self.wrong += group.accuracy == 0.0
        self.differing += differs
        self.flat_differing += differs and flat


@runtime_checkable
class Collecting(Protocol):
    """The state of a step's sampling, for those who watch it."""

    @property
    def needed(self) -> int:
        """Groups that the step trains on."""
        ...

    @property
    def kept(self) -> int:
        """Informative groups so far."""
        ...

    @property
    def tally(self) -> Tally:
        """Counts of the groups that were graded in this step so far."""
        ...

    @property
    def cursor(self) -> int:
        """The ordinal of the prompt that comes next."""
        ...

    @property
    def stage(self) -> str:
        """Where the step stands, for a person."""
        ...


class ShortfallError(RuntimeError):
    """Dynamic sampling used up its waves without finding enough informative groups."""


@dataclass(frozen=True, kw_only=True)
class InformativeShare:
    """Counts of the groups sampled lately and of the informative ones among them; those of earlier steps are halved at every step."""

    informative: float = 0.0
    sampled: float = 0.0

    def later(self, *, informative: int, sampled: int) -> "InformativeShare":
        """The same after a step that sampled so many groups."""
        return InformativeShare(
            informative=self.informative / 2 + informative, sampled=self.sampled / 2 + sampled
        )

    def prompts_for(self, groups: int) -> int:
        """Prompts that most often give so many informative groups.

        The share p is taken as (informative + 1) / (sampled + 1): 1 before anything was sampled, and never 0. Of n prompts about n p are
        informative, with a standard deviation below sqrt(n p); one such deviation is drawn on top.
        """
        wanted = groups + math.sqrt(groups)
        return math.ceil(wanted * (self.sampled + 1) / (self.informative + 1))


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The result of one step's sampling."""

    groups: list[Group]
    """The groups to train on, by ordinal."""
    carry: list[Group]
    """Informative groups left for the next step; empty unless surplus groups are carried."""
    sampled: list[Group]
    """Everything sampled in this step, by ordinal: what unbiased metrics are taken from."""
    cursor: int
    """The ordinal that the next step begins with."""
    waves: int
    surplus: int
    """Informative groups beyond those needed: carried, too old for it, or discarded."""
    version: int = 0
    """The version of the weights when the step began."""
    dropped_old: int = 0
    """The number of these that would have been carried, had they not been too old for the next step."""
    share: InformativeShare = field(default_factory=InformativeShare)
    """The estimate of the share of informative groups after this step."""
    rounds: int = 0
    """Rounds of rollouts in flight; then there are no waves."""
    drawn_tokens: int | None = None
    """Tokens that were drawn in this step; None: those of all that was sampled."""
    in_flight: InFlight | None = None
    """Rollouts that go on in the next step; None: each response was sampled to its end."""

    def logged(self, count: int) -> Sequence[Group]:
        """The groups of which a step's rollouts are written: the first that were sampled. With rollouts in flight, the first that are trained on, since a
        group whose verdict came in this step may be trained on in a later one."""
        return (self.groups if self.in_flight is not None else self.sampled)[:count]


@dataclass
class Collector:
    """The state machine of one step: `draw` ordinals for the sampler, `add` groups as they end, then `finish`.

    A further wave is opened as soon as it is certain to be needed: when every group still in flight could be
    informative and there would still be too few. So the long tail of one wave overlaps the start of the next, no work is
    thrown away, and the number of waves does not depend on timing.

    Where surplus groups are carried, the size of a wave is estimated from the groups that are missing and the share that was informative
    lately: whole waves would leave so many groups over that steps trained on old ones, or sampled nothing. How many are missing is known once
    the wave before has ended, so a wave that may be smaller waits for that, and its size does not depend on timing either.
    """

    needed: int
    cursor: int
    prompts_per_wave: int
    version: int = 0
    """The version of the weights that sample: steps done."""
    max_waves: int = 10
    """A step draws no more prompts than these waves have when they are whole."""
    carried: Sequence[Group] = ()
    share: InformativeShare = field(default_factory=InformativeShare)
    """The share of informative groups in the steps before."""
    surplus: str = "discard"
    """The use of informative groups beyond those needed: discard or carry."""
    max_age_steps: int = 1
    """The most steps for a carried group, counted between sampling a group and training on it."""
    metric: str = "correct"
    enabled: bool = True
    """False: one wave of `needed` prompts, all of which are trained on."""
    _sampled: list[Group] = field(default_factory=list)
    _pending: list[int] = field(default_factory=list)
    _in_flight: int = 0
    kept: int = 0
    """Informative groups so far, carried ones included."""
    tally: Tally = field(default_factory=Tally)
    """Counts of the groups sampled so far."""
    _waves: int = 0
    _drawn: int = 0

    def __post_init__(self) -> None:
        self.kept = len(self.carried)

    @property
    def waves(self) -> int:
        """Waves opened so far."""
        return self._waves

    @property
    def stage(self) -> str:
        """Where the step stands, for a person."""
        return f"wave {self._waves}" if self.enabled else ""

    def draw(self, count: int) -> list[int]:
        """Up to `count` ordinals to sample next; none if no further wave is needed as things stand."""
        if not self._pending and (wave := self._next_wave()):
            self._pending = list(range(self.cursor, self.cursor + wave))
            self.cursor += wave
            self._waves += 1
            self._drawn += wave
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._in_flight += len(taken)
        return taken

    def add(self, group: Group) -> None:
        """Takes a sampled and graded group."""
        self._sampled.append(group)
        self.tally.add(group)
        self._in_flight -= 1
        self.kept += self._keeps(group)

    def finish(self, *, on_shortfall: str = "error") -> Collected:
        """The first `needed` informative groups by ordinal, and what is left.

        Raises:
            ShortfallError: too few, and `on_shortfall` is error; or none at all. The message counts the groups by kind,
                since too easy and too hard call for opposite remedies.
        """
        self._sampled.sort(key=lambda group: group.prompt.ordinal)
        informative = [*self.carried, *(group for group in self._sampled if self._keeps(group))]
        if len(informative) < self.needed and (on_shortfall == "error" or not informative):
            raise ShortfallError(self._shortfall(len(informative)))
        left = informative[self.needed :]
        usable = [group for group in left if self.version - group.oldest < self.max_age_steps]
        carries = self.surplus == "carry"
        return Collected(
            groups=informative[: self.needed],
            carry=usable if carries else [],
            version=self.version,
            sampled=self._sampled,
            cursor=self.cursor,
            waves=self._waves,
            surplus=len(left),
            dropped_old=len(left) - len(usable) if carries else 0,
            share=self._share(),
        )

    def _keeps(self, group: Group) -> bool:
        return not self.enabled or is_informative(group, metric=self.metric)

    def _next_wave(self) -> int:
        """Prompts of the wave to open; 0 if none is needed as things stand."""
        missing = self.needed - self.kept - self._in_flight
        if missing <= 0:
            return 0
        if not self.enabled:
            return 0 if self._waves else missing
        whole = min(self.prompts_per_wave, self.max_waves * self.prompts_per_wave - self._drawn)
        if self.surplus != "carry":
            return whole
        # While groups are in flight they count as informative. Once they have ended, no fewer groups are missing and the share is no
        # higher, so the wave would only be larger: one that is already as large as may be need not wait for that.
        wave = self._share().prompts_for(missing)
        return min(wave, whole) if wave >= whole or not self._in_flight else 0

    def _share(self) -> InformativeShare:
        """The share with what this step sampled so far, as if all in flight were informative."""
        return self.share.later(
            informative=self.kept - len(self.carried) + self._in_flight,
            sampled=len(self._sampled) + self._in_flight,
        )

    def _shortfall(self, found: int) -> str:
        size = f"{'at most ' if self.surplus == 'carry' else ''}{self.prompts_per_wave}"
        return (
            f"dynamic sampling found {found} of the {self.needed} informative groups it needs in {self._waves} waves of "
            f"{size} prompts: {nothing_to_learn(self.tally, self._sampled, self.metric)}, raise dynamic_sampling.max_waves, or set "
            "dynamic_sampling.on_shortfall=train_fewer"
        )


def nothing_to_learn(tally: Tally, sampled: Sequence[Group], metric: str) -> str:
    """Why so few of the groups `sampled`, which `tally` has counted, are informative, and what can be done."""
    return _equal_scores(tally, sampled) if metric == "score" else _flat_verdicts(tally)


def _flat_verdicts(tally: Tally) -> str:
    differ = (
        f" In {tally.flat_differing} of these the scores differ, of which only those above 0 count as correct: if the reward is a number "
        "rather than a verdict, set dynamic_sampling.metric=score, which keeps them."
    )
    return (
        f"of {tally.groups} groups {tally.correct} were all correct, {tally.wrong} all wrong, {tally.mixed} mixed."
        f"{differ if tally.flat_differing else ''} All correct: the prompts are too easy. All wrong: they are too hard, or the grader "
        "never matches. Change the data or the grader"
    )


def _equal_scores(tally: Tally, sampled: Sequence[Group]) -> str:
    equal = [group.rollouts[0].verdict.score for group in sampled if not scores_differ(group)]
    scores = sorted({score for score in equal if score is not None})
    which = f" ({scores[0]:g}{f' to {scores[-1]:g}' if scores[1:] else ''})" if scores else ""
    return (
        f"of {tally.groups} groups {tally.differing} had scores that differ, {len(equal)} one score for all responses{which}, which "
        "teaches nothing. The reward function may give the same whatever is written, or the prompts may be too easy or too hard for it to "
        "tell responses apart. Change the data or the function, raise batch.group_size"
    )
