"""Dynamic sampling (DAPO Eq. 11, Algorithm 1): keep drawing prompts until enough groups carry a signal.

Decided on the host, on raw correctness, and by ordinals alone: the trained set is the first N informative groups by
ordinal, whatever order they ended in. Taking them as they end would favour short responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dapo_jax.rollouts import Group


def is_informative(group: Group, *, metric: str = "correct") -> bool:
    """True if the group's responses differ: 0 < #correct < G, or for graded scores, not all equal.

    Decided on the verdict, not on the reward: the overlong penalty gives an all-correct group unequal rewards, and
    training on it would teach length and nothing else.

    Raises:
        ValueError: `metric` is score and a verdict that was not lost has none.
    """
    if metric == "correct":
        return len({rollout.correct for rollout in group.rollouts}) == 2
    scores = [rollout.verdict.score for rollout in group.rollouts]
    if any(rollout.verdict.score is None and not rollout.verdict.lost for rollout in group.rollouts):
        raise ValueError(
            "dynamic_sampling.metric=score needs a reward function that returns scores; this one returned a plain "
            "verdict: return a number, or set dynamic_sampling.metric=correct"
        )
    return len(set(scores)) > 1


class ShortfallError(RuntimeError):
    """Dynamic sampling used up its waves without finding enough informative groups."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What one step's sampling gave."""

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
    """Informative groups beyond those needed, carried or discarded."""


@dataclass
class Collector:
    """The state machine of one step: `draw` ordinals for the sampler, `add` groups as they end, then `finish`.

    A further wave is opened as soon as it is certain to be needed: when every group still in flight could be
    informative and there would still be too few. So the long tail of one wave overlaps the start of the next, no work is
    thrown away, and the number of waves does not depend on timing.
    """

    needed: int
    cursor: int
    prompts_per_wave: int
    max_waves: int = 10
    carried: Sequence[Group] = ()
    metric: str = "correct"
    enabled: bool = True
    """False: one wave of `needed` prompts, all of which are trained on."""
    _sampled: list[Group] = field(default_factory=list)
    _pending: list[int] = field(default_factory=list)
    _in_flight: int = 0
    kept: int = 0
    """Informative groups so far, carried ones included."""
    _waves: int = 0

    def __post_init__(self) -> None:
        self.kept = len(self.carried)

    def draw(self, count: int) -> list[int]:
        """Up to `count` ordinals to sample next; none if no further wave is needed as things stand."""
        if not self._pending and self._must_open():
            wave = self.prompts_per_wave if self.enabled else self.needed - len(self.carried)
            self._pending = list(range(self.cursor, self.cursor + wave))
            self.cursor += wave
            self._waves += 1
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._in_flight += len(taken)
        return taken

    def add(self, group: Group) -> None:
        """Takes a sampled and graded group."""
        self._sampled.append(group)
        self._in_flight -= 1
        self.kept += self._keeps(group)

    def finish(
        self,
        *,
        on_shortfall: str = "error",
        surplus: str = "discard",
    ) -> Collected:
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
        return Collected(
            groups=informative[: self.needed],
            carry=left if surplus == "carry" else [],
            sampled=self._sampled,
            cursor=self.cursor,
            waves=self._waves,
            surplus=len(left),
        )

    def _keeps(self, group: Group) -> bool:
        return not self.enabled or is_informative(group, metric=self.metric)

    def _must_open(self) -> bool:
        allowed = self.max_waves if self.enabled else 1
        return self._waves < allowed and self.kept + self._in_flight < self.needed

    def _shortfall(self, found: int) -> str:
        right = sum(group.accuracy == 1.0 for group in self._sampled)
        wrong = sum(group.accuracy == 0.0 for group in self._sampled)
        total = len(self._sampled)
        return (
            f"dynamic sampling found {found} of the {self.needed} informative groups it needs in {self._waves} waves of "
            f"{self.prompts_per_wave} prompts: of {total} groups {right} were all correct, {wrong} all wrong, "
            f"{total - right - wrong} mixed. All correct: the prompts are too easy. All wrong: they are too hard, or the "
            "grader never matches. Change the data or the grader, raise dynamic_sampling.max_waves, or set "
            "dynamic_sampling.on_shortfall=train_fewer"
        )
