"""A virtual clock for rollouts in flight. It decides when responses start, when verdicts are due, and when a step ends.

A fixed number of responses is in flight throughout the run. Time is counted in rounds. In each round, every response in flight samples up to a fixed number of tokens. At
the end of a round, new responses replace those that ended, so nothing waits for the longest response. A group is complete when its last response has ended. Its verdict is
due a fixed number of rounds later, and sampling continues meanwhile. A step ends after the first round with enough informative groups. It trains on the first of these
groups by ordinal; the other groups stay ready for the next step. One round may complete enough groups for several steps.

Waves (DAPO, Algorithm 1) use the same clock, with rounds as long as the longest response: a wave's responses start together, and a step ends with its last wave.

Decisions depend only on lengths and verdicts, not on time, devices, slots or processes. So a run repeats bit for bit, although its steps overlap.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class ResponseId(NamedTuple):
    """Identifies a response by the ordinal of its prompt and its index in the group."""

    ordinal: int
    index: int


@dataclass(frozen=True, kw_only=True)
class ClockSizes:
    """The parameters of the clock. They depend on the configuration, not on the machines."""

    in_flight: int
    """Number of responses in flight throughout the run or, in waves, in each wave. Must be a multiple of `samples_per_prompt`."""
    samples_per_prompt: int
    """Number of responses in a group (G)."""
    needed: int
    """Number of informative groups that a step trains on."""
    answer_rounds: int = 1
    """Number of rounds between the end of a group's last response and the group's verdict, and between the end of an episode's turn and the environment's answer.
    If 0, verdicts and answers are used at once."""
    max_staleness: int = 0
    """The age bound S. A step waits for every group whose first response started S steps ago. No group starts while S + 1 steps' worth of groups are in progress or ready.
    So groups older than 2 S + 1 steps are never trained on. If 0, there is no bound."""
    waves: bool = False
    """If True, responses start in waves of `in_flight` responses. A wave starts as soon as it is certain to be needed, and a step ends when nothing is in flight."""


@dataclass
class GroupInFlight:
    """A group, from the start of its first response to its verdict."""

    version: int
    """Number of completed steps when the group's first response started. This is the weight version of its oldest token."""
    left: set[int]
    """Indices of the responses that have not ended."""
    due: int = -1
    """The round after which the group's verdict is due; -1 until all of its responses have ended."""


@dataclass
class VirtualClock:
    """The state of the clock. Until `step_ends`, call `start`, sample a round, then call `end_round`, and `end_group` for each group whose verdict is due. Then call
    `choose`, and `end_step`. Further rounds between these two calls are sampled by the same weights, and their groups are for later steps.

    Waves have no rounds. Until `step_ends`, call `start`, then `end_group` for every group, in any order.
    """

    sizes: ClockSizes
    version: int = 0
    """Number of completed steps, which is the version of the weights that sample."""
    rounds: int = 0
    """Number of rounds sampled since the start of the run."""
    following: ResponseId = field(default_factory=lambda: ResponseId(0, 0))
    """The response that starts next."""
    groups: dict[int, GroupInFlight] = field(default_factory=dict)
    """Groups without a verdict, by ordinal."""
    ready: dict[int, int] = field(default_factory=dict)
    """Informative groups that wait for training: ordinal -> `GroupInFlight.version`."""

    def in_flight(self) -> Iterator[ResponseId]:
        """Yields the responses that are being sampled, by ordinal and index."""
        for response in self.started():
            if response.index in self.groups[response.ordinal].left:
                yield response

    def started(self) -> Iterator[ResponseId]:
        """Yields the started responses of groups without a verdict, by ordinal and index: both the responses in flight and those that have ended."""
        for ordinal in sorted(self.groups):
            for index in range(self.sizes.samples_per_prompt):
                if ResponseId(ordinal, index) < self.following:
                    yield ResponseId(ordinal, index)

    def start(self, awake: Callable[[int], int] = int) -> list[ResponseId]:
        """Returns the responses to start now, in order: as many as bring the number in flight to `in_flight`, unless the age limit prevents it. `awake`
        maps an ordinal to the first ordinal from it on that is sampled. The ordinals before it are used without being sampled.

        Without rollouts in flight, returns the whole next wave if it is needed whatever the pending verdicts are, and otherwise an empty list.
        """
        sizes, bound, started = self.sizes, self.sizes.max_staleness, list[ResponseId]()
        if sizes.waves:
            room = sizes.in_flight if len(self.groups) + len(self.ready) < sizes.needed else 0
        else:
            room = sizes.in_flight - sum(1 for _ in self.in_flight())
        while len(started) < room:
            ordinal, index = self.following
            if index == 0:
                if bound and len(self.groups) + len(self.ready) >= (bound + 1) * sizes.needed:
                    break
                ordinal = awake(ordinal)
                self.groups[ordinal] = GroupInFlight(self.version, set(range(sizes.samples_per_prompt)))
            started.append(ResponseId(ordinal, index))
            is_last = index + 1 == sizes.samples_per_prompt
            self.following = ResponseId(ordinal + 1, 0) if is_last else ResponseId(ordinal, index + 1)
        return started

    def end_round(self, ended: Collection[ResponseId]) -> list[int]:
        """Records the responses that ended in the round. Returns the ordinals of the groups whose verdicts are due now, for `end_group`."""
        self.rounds += 1
        for response in ended:
            group = self.groups[response.ordinal]
            assert response < self.following, f"{response} has not started"
            group.left.remove(response.index)
            if not group.left:
                group.due = self.rounds + self.sizes.answer_rounds
        return sorted(ordinal for ordinal, group in self.groups.items() if 0 <= group.due <= self.rounds)

    def end_group(self, ordinal: int, *, informative: bool) -> None:
        """Records the verdict of a group whose responses have all ended."""
        group = self.groups.pop(ordinal)
        if informative:
            self.ready[ordinal] = group.version

    @property
    def step_ends(self) -> bool:
        """Whether there are enough groups to train on, and there is no older group for which the step must wait."""
        bound = self.sizes.max_staleness
        waited_for = self.groups.values() if bound or self.sizes.waves else ()
        waits = any(self.version - group.version >= bound for group in waited_for)
        return len(self.ready) >= self.sizes.needed and not waits

    def choose(self) -> dict[int, int]:
        """Returns the ordinals of the groups to train on, mapped to the age of each group's oldest token in steps. These are the first groups by ordinal."""
        ordinals = sorted(self.ready)[: self.sizes.needed]
        return {ordinal: self.version - self.ready.pop(ordinal) for ordinal in ordinals}

    def end_step(self) -> None:
        """Ends the step, after `choose`. All later tokens are sampled by the next version of the weights."""
        self.version += 1

    def whole(self, ordinals: Iterable[int]) -> list[int]:
        """Returns the groups in `ordinals` whose last response has ended, without duplicates."""
        return sorted({ordinal for ordinal in ordinals if self.groups[ordinal].due >= 0})

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON values for a checkpoint. `restored` is the inverse."""
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
        """Returns the clock with the given `state`."""
        groups = dict[int, GroupInFlight]()
        for ordinal, version, left, due in state["groups"]:
            groups[ordinal] = GroupInFlight(version, set(left), due)
        sizes, following = ClockSizes(**state["sizes"]), ResponseId(*state["following"])
        counts = {"version": state["version"], "rounds": state["rounds"]}
        return cls(sizes, **counts, following=following, groups=groups, ready=dict(state["ready"]))
