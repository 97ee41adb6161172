"""Rollouts in flight by a virtual clock: when a response starts, a group is whole, a verdict is due and a step ends.

A fixed number of responses is in flight over the whole run. Time is counted in rounds: in each, every response in flight draws up to a fixed number of tokens. At the end of
a round those that ended are replaced by the next (ordinal, index), so nothing waits for the longest; a group is whole when its last response has ended, and its
verdict is due a fixed number of rounds later, while others go on. A step ends at the first end of a round at which enough informative groups have their
verdicts; it trains on the first of these by ordinal, and what is beyond them waits for the next step: nothing is thrown away. Where one round has
brought enough for several steps, these follow each other without a further one.

What is decided depends on lengths and verdicts alone, not on seconds, devices, slots or processes; so a run repeats bit for bit, although its steps overlap.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

_MOST = 1 << 53
"""No run counts so far; ordinals are 64-bit integers."""


class ResponseId(NamedTuple):
    """One response of a run."""

    ordinal: int
    index: int


@dataclass(frozen=True, kw_only=True)
class ClockSizes:
    """The numbers that the clock goes by; all are of the configuration, none of the machines."""

    in_flight: int
    """Responses in flight over the whole run."""
    samples_per_prompt: int
    """G, responses of a group."""
    needed: int
    """Informative groups that a step trains on."""
    verdict_rounds: int = 1
    """Rounds from the end of a group's last response to the round at whose end its verdict is due; 0: at once."""
    max_age_steps: int = 0
    """S: a step does not end while there is a group without a verdict whose first response started S steps ago; and no group begins while as many as
    S + 1 steps train on are under way, or what waits would get old instead. So nothing is trained on that is older than 2 S + 1 steps, and hardly
    anything older than S. 0: no bound."""

    def __post_init__(self) -> None:
        if self.in_flight < self.samples_per_prompt or self.in_flight % self.samples_per_prompt:
            raise ValueError(
                f"in_flight={self.in_flight} must be a multiple of the {self.samples_per_prompt} responses of a group, which start together; "
                f"{-(-max(self.in_flight, 1) // self.samples_per_prompt) * self.samples_per_prompt} is"
            )
        for name, least in (
            ("samples_per_prompt", 1),
            ("needed", 1),
            ("verdict_rounds", 0),
            ("max_age_steps", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be {least} or more")


@dataclass
class GroupInFlight:
    """A group from its first response's start to its verdict."""

    version: int
    """Steps done when its first response started: the version of its oldest token's weights."""
    left: set[int]
    """Indices that have not ended."""
    due: int = -1
    """The round at whose end its verdict is due; -1 while responses are left."""


@dataclass
class VirtualClock:
    """The state of what is in flight. In this order, until `step_ends`: `start`; a round is sampled; `end_round`; `judge`. Then `end_step`."""

    sizes: ClockSizes
    version: int = 0
    """Steps done, which is the version of the weights that sample."""
    rounds: int = 0
    """Rounds done, since the run began."""
    following: ResponseId = field(default_factory=lambda: ResponseId(0, 0))
    """The response that starts next."""
    groups: dict[int, GroupInFlight] = field(default_factory=dict)
    """Groups without a verdict, by ordinal."""
    ready: dict[int, int] = field(default_factory=dict)
    """Informative groups that wait to be trained on: ordinal -> the version of `GroupInFlight`."""

    def in_flight(self) -> Iterator[ResponseId]:
        """The responses that are being drawn, by ordinal and index."""
        for ordinal in sorted(self.groups):
            for index in sorted(self.groups[ordinal].left):
                if ResponseId(ordinal, index) < self.following:
                    yield ResponseId(ordinal, index)

    @property
    def _count(self) -> int:
        """The number of responses in flight, without going through them: those that are left, but for the ones of the last group that have not started."""
        left = sum(len(group.left) for group in self.groups.values())
        return left - (self.sizes.samples_per_prompt - self.following.index if self.following.index else 0)

    def start(self) -> list[ResponseId]:
        """The responses that start now, in order: as many as are missing of those in flight, or as a bound on ages allows."""
        started: list[ResponseId] = []
        bound = self.sizes.max_age_steps
        most = (bound + 1) * self.sizes.needed if bound else _MOST
        for _ in range(self.sizes.in_flight - self._count):
            one = self.following
            if one.index == 0:
                if len(self.groups) + len(self.ready) >= most:
                    break
                self.groups[one.ordinal] = GroupInFlight(
                    self.version, set(range(self.sizes.samples_per_prompt))
                )
            started.append(one)
            last = one.index + 1 == self.sizes.samples_per_prompt
            self.following = (
                ResponseId(one.ordinal + 1, 0) if last else ResponseId(one.ordinal, one.index + 1)
            )
        return started

    def end_round(self, ended: Collection[ResponseId]) -> list[int]:
        """Takes the responses that ended in the round. Returned are the groups whose verdict is due now, by ordinal, for `judge`.

        Raises:
            ValueError: one of them is not in flight.
        """
        self.rounds += 1
        for one in sorted(ended):
            group = self.groups.get(one.ordinal)
            if group is None or one.index not in group.left or one >= self.following:
                raise ValueError(
                    f"response {one.index} to prompt {one.ordinal} is not in flight, and cannot have ended"
                )
            group.left.discard(one.index)
            if not group.left:
                group.due = self.rounds + self.sizes.verdict_rounds
        return sorted(ordinal for ordinal, group in self.groups.items() if 0 <= group.due <= self.rounds)

    def judge(self, informative: Mapping[int, bool]) -> None:
        """Takes the verdicts that are due: whether each group is informative.

        Raises:
            ValueError: they are not those of the groups that are due.
        """
        due = {ordinal for ordinal, group in self.groups.items() if 0 <= group.due <= self.rounds}
        if due != informative.keys():
            raise ValueError(
                f"verdicts of the groups {sorted(due)} are due at the end of round {self.rounds}; those of {sorted(informative)} were given"
            )
        for ordinal in sorted(due):
            group = self.groups.pop(ordinal)
            if informative[ordinal]:
                self.ready[ordinal] = group.version

    @property
    def step_ends(self) -> bool:
        """Whether there are enough groups to train on, and no older group is held for."""
        return len(self.ready) >= self.sizes.needed and not self._is_held

    @property
    def _is_held(self) -> bool:
        """Whether a group has no verdict that is as old as may be."""
        bound = self.sizes.max_age_steps
        return bound > 0 and any(self.version - group.version >= bound for group in self.groups.values())

    def end_step(self) -> dict[int, int]:
        """The groups to train on, the first by ordinal, as many as there are of those needed; and each one's age: how many steps ago its oldest
        token was drawn. From here on the weights are those of the next step."""
        taken = sorted(self.ready)[: self.sizes.needed]
        ages = {ordinal: self.version - self.ready.pop(ordinal) for ordinal in taken}
        self.version += 1
        return ages

    def whole(self, ordinals: Iterable[int]) -> list[int]:
        """The groups of `ordinals`, each once, whose last response has ended; none of them has its verdict."""
        return sorted({ordinal for ordinal in ordinals if self.groups[ordinal].due >= 0})

    def copy(self) -> "VirtualClock":
        """A clock that shows the same and goes on by itself."""
        return deepcopy(self)

    def started(self) -> Iterator[ResponseId]:
        """The responses that have started of the groups without a verdict, by ordinal and index: those in flight, and those that ended."""
        for ordinal in sorted(self.groups):
            for index in range(self.sizes.samples_per_prompt):
                if ResponseId(ordinal, index) < self.following:
                    yield ResponseId(ordinal, index)

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as JSON can hold it; `restored` takes it."""
        return {
            "sizes": asdict(self.sizes),
            "version": self.version,
            "rounds": self.rounds,
            "following": list(self.following),
            "groups": [
                [ordinal, group.version, sorted(group.left), group.due]
                for ordinal, group in sorted(self.groups.items())
            ],
            "ready": [list(item) for item in sorted(self.ready.items())],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "VirtualClock":
        """The clock that gave `state`.

        Raises:
            ValueError: no clock did.
        """
        try:
            clock = cls(
                ClockSizes(**state["sizes"]),
                version=state["version"],
                rounds=state["rounds"],
                following=ResponseId(*state["following"]),
                groups={
                    ordinal: GroupInFlight(version, set(left), due)
                    for ordinal, version, left, due in state["groups"]
                },
                ready=dict(state["ready"]),
            )
            kept = clock.state() == state
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it is not of a clock: {error}") from error
        if not kept or not clock._is_one():
            raise ValueError("it is not of a clock: its numbers contradict each other")
        return clock

    def _is_one(self) -> bool:
        """Whether what it shows can have come about."""
        sizes, following = self.sizes, self.following
        numbers = [self.version, self.rounds, *following, *self.groups, *self.ready, *self.ready.values()]
        numbers += [number for group in self.groups.values() for number in (group.version, *group.left)]
        dues = [group.due for group in self.groups.values()]
        if not all(type(number) is int and 0 <= number < _MOST for number in numbers) or not all(
            type(due) is int and -1 <= due <= self.rounds + sizes.verdict_rounds for due in dues
        ):
            return False
        indices = range(sizes.samples_per_prompt)
        return (
            following.index in indices
            and all(index in indices for group in self.groups.values() for index in group.left)
            and all((group.due < 0) == bool(group.left) for group in self.groups.values())
            and all(ResponseId(ordinal, 0) < following for ordinal in (*self.groups, *self.ready))
            and self.groups.keys().isdisjoint(self.ready)
            and (following.index == 0 or following.ordinal in self.groups)
            and all(version <= self.version for version in self.ready.values())
            and all(group.version <= self.version for group in self.groups.values())
            and sum(1 for _ in self.in_flight()) <= sizes.in_flight
        )
