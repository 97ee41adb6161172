"""One step's sampling by the virtual clock: who starts, what was drawn, which groups are whole and which of them the step trains on.

Pure bookkeeping on the host, the same in every process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dapo_jax.dapo.dynamic_sampling import Collected, ShortfallError, Tally, is_informative, nothing_to_learn
from dapo_jax.dapo.in_flight import NOTHING, Drawn, InFlight, ResponseSoFar
from dapo_jax.dapo.rollouts import Group, Response
from dapo_jax.dapo.virtual_clock import ClockSizes, ResponseId, VirtualClock


@dataclass
class FlightCollector:
    """The sampling of one step by the clock. In this order while `goes_on`: `start`; a round is sampled; `take`; `judge`. Then `finish`."""

    clock: VirtualClock
    responses: dict[ResponseId, ResponseSoFar]
    ready: dict[int, Group]
    """Informative groups that wait to be trained on, by ordinal."""
    max_groups: int | None
    """The most groups of which a step takes verdicts: with too few informative ones among them it has failed. None: no limit."""
    metric: str = "correct"
    enabled: bool = True
    """False: all groups are trained on."""
    tally: Tally = field(default_factory=Tally)
    """Counts of the groups whose verdicts came in this step."""
    rounds: int = 0
    """Rounds of this step."""
    drawn_tokens: int = 0
    """Tokens that were drawn in this step."""
    _judged: list[Group] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        sizes: ClockSizes,
        in_flight: InFlight | None,
        ready: Sequence[Group],
        *,
        max_groups: int | None,
        metric: str,
        enabled: bool,
    ) -> "FlightCollector":
        """The collector of a step that begins with what is in flight; None: with nothing, as the first one does."""
        return cls(
            clock=VirtualClock(sizes) if in_flight is None else in_flight.clock.copy(),
            responses={} if in_flight is None else dict(in_flight.responses),
            ready={group.prompt.ordinal: group for group in ready},
            max_groups=max_groups,
            metric=metric,
            enabled=enabled,
        )

    @property
    def needed(self) -> int:
        """Groups that the step trains on."""
        return self.clock.sizes.needed

    @property
    def kept(self) -> int:
        """Informative groups so far."""
        return len(self.ready)

    @property
    def cursor(self) -> int:
        """The first ordinal of which nothing has started."""
        return self.clock.following.ordinal + (self.clock.following.index > 0)

    @property
    def stage(self) -> str:
        """Where the step stands, for a person."""
        return f"round {self.rounds}"

    @property
    def goes_on(self) -> bool:
        """Whether another round is to be sampled."""
        within = self.max_groups is None or self.tally.groups < self.max_groups
        return within and not self.clock.step_ends

    def start(self) -> list[ResponseId]:
        """The responses that start now, in order."""
        started = self.clock.start()
        self.responses.update(dict.fromkeys(started, NOTHING))
        return started

    def take(self, drawn: Mapping[ResponseId, Drawn]) -> tuple[list[int], list[int]]:
        """Takes a round: what every response in flight has drawn.

        Returned are the groups of which the last response has ended in it, to be graded, and those whose verdicts are due now, to be judged.
        """
        self.rounds += 1
        ended = []
        for one, part in drawn.items():
            self.responses[one] = self.responses[one].longer(part, self.clock.version)
            self.drawn_tokens += len(part.tokens)
            if part.finish_reason is not None:
                ended.append(one)
        due = self.clock.end_round(ended)
        return self.clock.whole(one.ordinal for one in ended), due

    def responses_to(self, ordinal: int) -> tuple[Response, ...]:
        """The responses of a whole group."""
        return tuple(
            self.responses[ResponseId(ordinal, index)].whole
            for index in range(self.clock.sizes.samples_per_prompt)
        )

    def waiting_for_verdicts(self) -> list[int]:
        """Groups that are whole and have no verdict yet, by ordinal."""
        return self.clock.whole(self.clock.groups)

    def judge(self, groups: Sequence[Group]) -> None:
        """Takes the verdicts that are due: graded groups."""
        informative = {
            group.prompt.ordinal: not self.enabled or is_informative(group, metric=self.metric)
            for group in groups
        }
        self.clock.judge(informative)
        for group in groups:
            ordinal = group.prompt.ordinal
            self._judged.append(group)
            self.tally.add(group)
            if informative[ordinal]:
                self.ready[ordinal] = group
            for index in range(self.clock.sizes.samples_per_prompt):
                del self.responses[ResponseId(ordinal, index)]

    def finish(self, *, on_shortfall: str = "error") -> Collected:
        """The first groups by ordinal of those that wait, as many as a step trains on, and what goes on.

        Raises:
            ShortfallError: too few, and `on_shortfall` is error; or none at all.
        """
        if len(self.ready) < self.needed and (on_shortfall == "error" or not self.ready):
            raise ShortfallError(self._shortfall())
        version = self.clock.version
        groups = [self.ready.pop(ordinal) for ordinal in self.clock.end_step()]
        self._judged.sort(key=lambda group: group.prompt.ordinal)
        return Collected(
            groups=groups,
            carry=[self.ready[ordinal] for ordinal in sorted(self.ready)],
            sampled=self._judged,
            cursor=self.cursor,
            waves=0,
            surplus=len(self.ready),
            version=version,
            rounds=self.rounds,
            drawn_tokens=self.drawn_tokens,
            in_flight=InFlight(clock=self.clock.copy(), responses=dict(self.responses)),
        )

    def _shortfall(self) -> str:
        return (
            f"dynamic sampling found {self.kept} of the {self.needed} informative groups it needs among the {self.tally.groups} whose verdicts came "
            f"in this step: {nothing_to_learn(self.tally, self._judged, self.metric)}, raise dynamic_sampling.max_waves, or set "
            "dynamic_sampling.on_shortfall=train_fewer"
        )
