"""Graded groups for the steps of a run whose rollouts stay in flight: round by round, by a clock that every process keeps alike.

Between two ends of a round no process waits for another. At the end each gets what the others have drawn, in one exchange of a shape that is always the same,
and the verdicts that are due; so each decides alike what starts, which groups are whole and when the step ends.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, PyTree

from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.flight_collector import FlightCollector
from dapo_jax.dapo.in_flight import Drawn
from dapo_jax.dapo.rollouts import Group, Prompt
from dapo_jax.dapo.virtual_clock import ClockSizes, ResponseId
from dapo_jax.rewards.grading import Pending
from dapo_jax.run.flight_episodes import FlightEpisodes
from dapo_jax.run.flight_exchange import FlightExchange
from dapo_jax.run.group_sampling import FOR_OTHERS, GroupSampling
from dapo_jax.run.position import Position
from dapo_jax.run.response_sampler import TRAINING
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.rounds import Going, RoundSampler


class FlightSampling(GroupSampling):
    """Samples with `rollout.in_flight` responses in flight over the whole run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `GroupSampling`."""
        super().__init__(*args, **kwargs)
        config = self._config
        self._sizes = ClockSizes(
            in_flight=config.rollout.in_flight,
            samples_per_prompt=config.batch.group_size,
            needed=config.batch.prompts_per_step,
            verdict_rounds=config.rollout.answer_rounds,
            max_age_steps=config.rollout.max_age_steps,
        )
        self._exchange = FlightExchange(
            self._share, self._stop, in_flight=self._sizes.in_flight, round_tokens=config.rollout.round_tokens
        )
        self._pending: dict[int, Pending] = {}
        """Groups whose verdicts this process waits for, by ordinal."""
        self._asked: dict[int, Prompt] = {}
        """The prompts of groups without a verdict, by ordinal."""
        self._talk: FlightEpisodes | None = None
        if self._episodes is not None:
            self._talk = FlightEpisodes(
                self._episodes,
                self._sampler.limits(self._episodes),
                share=self._share,
                exchange=self._exchange,
                prompt_at=self._prompt_at,
                watch=self._watch,
            )

    def collector(self, position: Position) -> FlightCollector:
        """The sampling of the step after `position`."""
        config, dynamic = self._config, self._config.dynamic_sampling
        return FlightCollector.of(
            self._sizes,
            position.in_flight,
            position.carry,
            max_groups=config.prompts_per_wave * dynamic.max_waves if dynamic.enabled else None,
            metric=dynamic.metric,
            enabled=dynamic.enabled,
            answer_rounds=config.rollout.answer_rounds if self._talk else None,
        )

    def groups(self, weights: PyTree, collector: FlightCollector) -> Iterator[Group]:
        """The graded groups of a step in the order of rounds, and of ordinals within one.

        Raises:
            StoppedError: the run was told to stop; in every process.
            RewardError: a reward function failed; in every process.
        """
        sampler: RoundSampler | None = None
        drawn_before = {one: len(collector.responses[one].tokens) for one in collector.clock.in_flight()}
        places = Places(self._sizes.in_flight, self._share.count, drawn_before)
        if self._talk is not None:
            self._talk.ask(collector)  # before groups are handed over whose episodes it does not know
        for ordinal in collector.waiting_for_verdicts():
            self._hand_over(ordinal, collector)
        try:
            while collector.goes_on:
                if sampler is None:  # not where enough groups wait: nothing is read again for no round
                    sampler = self._sampler.rounds(
                        weights,
                        decoding=decoding(temperature=self._config.sampling.temperature),
                        domain=TRAINING,
                        episodes=self._episodes,
                    )
                places.give(collector.start())
                self._converse(collector)
                collector.take(self._round(sampler, collector, places))
                self._converse(collector)
                ended, whole, due = collector.end_round()
                places.leave(ended)
                for ordinal in whole:
                    self._hand_over(ordinal, collector)
                groups = self._verdicts(due, collector)
                collector.judge(groups)
                for ordinal in due:
                    self._asked.pop(ordinal, None)
                yield from groups
        finally:
            if sampler is not None:
                sampler.close()

    def _converse(self, collector: FlightCollector) -> None:
        """Hands new turns over to environments, and takes the answers that are due."""
        if self._talk is not None:
            self._talk.ask(collector)
            self._talk.hear(collector)

    def finish(self, collector: FlightCollector) -> Collected:
        """The groups that a step trains on, those that wait, and what goes on; every process has them whole.

        Raises:
            ShortfallError: there are too few informative groups.
        """
        return collector.finish(on_shortfall=self._config.dynamic_sampling.on_shortfall)

    def _round(
        self, sampler: RoundSampler, collector: FlightCollector, places: "Places"
    ) -> dict[ResponseId, Drawn]:
        """Samples a round: returns what each response in flight has drawn, in all processes, but for those that wait for environments, and those that are over."""
        mine = places.of(self._share.index)
        going = [
            Going(
                prompt=self._prompt_at(one.ordinal),
                index=one.index,
                tokens=collector.responses[one].tokens,
                turn=collector.responses[one].present_turn,
            )
            for one in mine
            if collector.draws(one)
        ]

        def draw() -> Sequence[Drawn]:
            waiting = [one for one in mine if collector.waits(one)]
            return sampler.draw(going, self._config.rollout.round_tokens, waiting=waiting)

        drawn = self._exchange.drawn(draw)
        self._watch.note(FOR_OTHERS, for_others=True)
        of_samplers = map(places.of, range(self._share.count))
        asked = [list(filter(collector.draws, of_sampler)) for of_sampler in of_samplers]
        return self._exchange.round(asked, drawn)

    def _hand_over(self, ordinal: int, collector: FlightCollector) -> None:
        """Gives a whole group to the graders, if it is this process that grades it."""
        if self._share.grades and self._share.takes(ordinal) and ordinal not in self._pending:
            with self._exchange.grading():
                self._pending[ordinal] = self._grading.begin(
                    self._prompt_at(ordinal), collector.responses_to(ordinal)
                )

    def _verdicts(self, due: Sequence[int], collector: FlightCollector) -> list[Group]:
        """The groups whose verdicts are due, graded, in every process."""
        if not due:
            return []
        groups: list[Group] = []
        with self._exchange.grading():
            groups = [self._pending.pop(ordinal).graded() for ordinal in due if ordinal in self._pending]
        self._watch.note(FOR_OTHERS, for_others=True)
        return self._exchange.verdicts(groups, self._prompt_at, collector.responses_to)

    def _prompt_at(self, ordinal: int) -> Prompt:
        if ordinal not in self._asked:
            self._watch.note("reading prompts")
            self._asked[ordinal] = self._prompts[ordinal]
        return self._asked[ordinal]


def dealt(tokens: Sequence[int] | Int[np.ndarray, " going"], samplers: int) -> Int[np.ndarray, " going"]:
    """The sampler of each response that goes on, by the tokens that it has drawn.

    They are dealt out to and fro, the longest first, so that all samplers hold and read about as much, and of what does not divide the first ones have one more. By
    ordinal the first sampler would have all that have been in flight for long: more than its pages hold, while the others wait for it at the end of each round.
    """
    order = np.argsort(-np.asarray(tokens, np.int64), kind="stable")
    turn, at = np.divmod(np.arange(len(order)), samplers)
    back = (turn % 2 == 1) & (turn < len(order) // samplers)
    found = np.empty(len(order), np.int64)
    found[order] = np.where(back, samplers - 1 - at, at)
    return found


class Places:
    """The sampler that has each response in flight. Which one it is changes no result."""

    def __init__(self, in_flight: int, samplers: int, going: Mapping[ResponseId, int]) -> None:
        """Spreads the responses `going` on, which are all read again, by the tokens that each has drawn (`dealt`)."""
        self._most = [in_flight // samplers + (sampler < in_flight % samplers) for sampler in range(samplers)]
        self._at: list[set[ResponseId]] = [set() for _ in range(samplers)]
        ids = sorted(going)
        for one, sampler in zip(ids, dealt([going[one] for one in ids], samplers).tolist(), strict=True):
            self._at[sampler].add(one)

    def give(self, started: Sequence[ResponseId]) -> None:
        """Takes those that start, in order: to where places are free."""
        free = [
            sampler
            for sampler, (at, most) in enumerate(zip(self._at, self._most, strict=True))
            for _ in range(most - len(at))
        ]
        for one, sampler in zip(started, free, strict=False):
            self._at[sampler].add(one)

    def leave(self, ended: Iterable[ResponseId]) -> None:
        """Lets go of those that ended."""
        gone = set(ended)
        for at in self._at:
            at -= gone

    def of(self, sampler: int) -> list[ResponseId]:
        """The responses of a sampler, in order."""
        return sorted(self._at[sampler])
