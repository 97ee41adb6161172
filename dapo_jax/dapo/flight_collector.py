"""One step's sampling by the virtual clock: who starts, what was drawn, which groups are whole and which of them the step trains on.

Pure bookkeeping on the host, the same in every process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dapo_jax.dapo.dynamic_sampling import Collected, ShortfallError, Tally, is_informative, nothing_to_learn
from dapo_jax.dapo.in_flight import NOTHING, Drawn, EpisodeSoFar, InFlight, ResponseSoFar, Standing
from dapo_jax.dapo.rollouts import Continuation, FinishReason, Group, Response
from dapo_jax.dapo.virtual_clock import ClockSizes, ResponseId, VirtualClock


class RoundEnd(NamedTuple):
    """The outcome of a round."""

    ended: list[ResponseId]
    """The responses that ended in it."""
    whole: list[int]
    """The groups of which the last response has ended in it, to be graded."""
    due: list[int]
    """The groups whose verdicts are due now, to be judged."""


@dataclass
class FlightCollector:
    """The sampling of one step by the clock. In this order while `goes_on`: `start`; a round is sampled; `take`; `end_round`; `judge`. Then `finish`.

    Responses that are episodes have answers, too, each of them some rounds after the turn, or the start, that it answers: behind `start`, and behind `take`, `answer` takes
    those of `answers_due`.
    """

    clock: VirtualClock
    responses: dict[ResponseId, ResponseSoFar]
    ready: dict[int, Group]
    """Informative groups that wait to be trained on, by ordinal."""
    max_groups: int | None
    """The most groups of which a step takes verdicts: with too few informative ones among them it has failed. None: no limit."""
    metric: str = "correct"
    enabled: bool = True
    """False: all groups are trained on."""
    answer_rounds: int | None = None
    """Rounds from the end of a turn to the one at whose end its environment's answer is taken; 0: at once. None: responses are no episodes."""
    tally: Tally = field(default_factory=Tally)
    """Counts of the groups whose verdicts came in this step."""
    rounds: int = 0
    """Rounds of this step."""
    drawn_tokens: int = 0
    """Tokens that were drawn in this step."""
    _judged: list[Group] = field(default_factory=list)
    _ended: list[ResponseId] = field(default_factory=list)
    """Responses that ended since the last end of a round."""
    _taken: bool = False
    """Whether the present round is drawn."""

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
        answer_rounds: int | None = None,
    ) -> "FlightCollector":
        """The collector of a step that begins with what is in flight; None: with nothing, as the first one does."""
        return cls(
            clock=VirtualClock(sizes) if in_flight is None else in_flight.clock.copy(),
            responses={} if in_flight is None else dict(in_flight.responses),
            ready={group.prompt.ordinal: group for group in ready},
            max_groups=max_groups,
            metric=metric,
            enabled=enabled,
            answer_rounds=answer_rounds,
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
        """The responses that start now, in order. Episodes wait for what their environments put before the first turn."""
        started = self.clock.start()
        begins = NOTHING
        if self.answer_rounds is not None:
            begins = replace(NOTHING, episode=EpisodeSoFar(due=self._now + self.answer_rounds))
        self.responses.update(dict.fromkeys(started, begins))
        return started

    def waits(self, one: ResponseId) -> bool:
        """Whether a response in flight draws nothing, because its environment works."""
        episode = self.responses[one].episode
        return episode is not None and episode.due is not None

    def draws(self, one: ResponseId) -> bool:
        """Whether a response in flight draws in the next round: it does not wait, and is not over, as an episode may be that was lost before its first turn."""
        return self.responses[one].finish_reason is None and not self.waits(one)

    def take(self, drawn: Mapping[ResponseId, Drawn]) -> None:
        """Takes a round: what every response in flight has drawn but those that wait."""
        self.rounds += 1
        self._taken = True
        for one, part in drawn.items():
            longer = self.responses[one].longer(part, self.clock.version)
            self.drawn_tokens += len(part.tokens)
            if part.finish_reason is not None:
                if self.answer_rounds is None:
                    self._ended.append(one)
                else:
                    longer = longer.turn_ended(part, due=self._now + self.answer_rounds)
            self.responses[one] = longer

    def answers_due(self) -> list[ResponseId]:
        """The responses whose environments' answers are taken now, in order."""
        found = []
        for one in self.clock.in_flight():
            episode = self.responses[one].episode
            if episode is not None and episode.due is not None and episode.due <= self._now:
                found.append(one)
        return found

    def answer(
        self, one: ResponseId, before: Continuation | None, standing: Standing, *, end: FinishReason | None
    ) -> None:
        """Takes an environment's answer, and what it says of the episode so far. The episode has come to its `end`, or its next turn begins behind `before`."""
        self.responses[one] = self.responses[one].answered(before, standing, end, self.clock.version)
        if end is not None:
            self._ended.append(one)

    def end_round(self) -> RoundEnd:
        """Ends a round that was taken."""
        ended, self._ended, self._taken = self._ended, [], False
        due = self.clock.end_round(ended)
        return RoundEnd(ended, self.clock.whole(one.ordinal for one in ended), due)

    @property
    def _now(self) -> int:
        """Rounds that are drawn."""
        return self.clock.rounds + self._taken

    def responses_to(self, ordinal: int) -> tuple[Response, ...]:
        """The responses of a whole group."""
        version = self.clock.groups[ordinal].version
        return tuple(
            self.responses[ResponseId(ordinal, index)].whole(version)
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
