"""Episodes whose turns are drawn round by round: who talks with which environment, and when an answer is taken.

The process that grades a group has its episodes; it hands over each turn when its round has ended, and the answer is taken a fixed number of rounds later, in every process at once. So
what is drawn depends on what environments answer, and not on when.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait

from dapo_jax.dapo.episode_limits import EpisodeLimits
from dapo_jax.dapo.flight_collector import FlightCollector
from dapo_jax.dapo.rollouts import Continuation, Prompt
from dapo_jax.dapo.virtual_clock import ResponseId
from dapo_jax.environments import Episodes
from dapo_jax.health.stalls import Watch
from dapo_jax.run.flight_exchange import FlightExchange, Said
from dapo_jax.run.group_exchange import SamplerShare
from dapo_jax.run.group_sampling import FOR_OTHERS

_LOOK_S = 1.0


class FlightEpisodes:
    """The environments of a run whose episodes are in flight."""

    def __init__(
        self,
        episodes: Episodes,
        limits: EpisodeLimits,
        *,
        share: SamplerShare,
        exchange: FlightExchange,
        prompt_at: Callable[[int], Prompt],
        watch: Watch,
    ) -> None:
        """`watch` is told, each second at least, that environments are waited for."""
        self._episodes, self._limits = episodes, limits
        self._share, self._exchange = share, exchange
        self._prompt_at, self._watch = prompt_at, watch
        self._asked: dict[ResponseId, Future[Continuation | None]] = {}
        self._known: set[ResponseId] = set()
        """The episodes of this process that are open."""

    def ask(self, collector: FlightCollector) -> None:
        """Hands over what environments have not heard: starts, and turns that have ended. Episodes of which this process knows nothing, such as those of a
        checkpoint, are opened with what was said."""
        for one in collector.clock.started():
            response = collector.responses[one]
            if response.episode is None or not self._takes(one):
                continue
            waits = collector.waits(one)
            if one not in self._known or (waits and one not in self._asked):
                self._open(one, collector, waits=waits)
        self._known &= collector.responses.keys()

    def hear(self, collector: FlightCollector) -> None:
        """Takes the answers that are due, in every process.

        Raises:
            StoppedError: one of the processes was told to stop; in all of them.
            RewardError: a reward function failed in one of them; in all.
        """
        due = collector.answers_due()
        if not due:
            return
        said: dict[ResponseId, Said] = {}
        with self._exchange.grading():
            mine = {one: self._asked[one] for one in due if self._takes(one)}
            while wait(mine.values(), timeout=_LOOK_S).not_done:
                self._watch.note("waiting for environments")
            for one, answer in mine.items():
                standing = self._episodes.standing(self._prompt_at(one.ordinal), one.index)
                said[one] = Said(before=answer.result(), standing=standing)
                del self._asked[one]
        self._watch.note(FOR_OTHERS, for_others=True)
        answers = self._exchange.answers(said)
        for one in due:
            response, answer = collector.responses[one], answers[one]
            assert response.episode is not None
            behind_prompt = 0 if response.episode.contexts else len(self._prompt_at(one.ordinal).tokens)
            end = self._limits.end(
                answer.before,
                reasons=response.episode.reasons,
                drawn=len(response.tokens),
                length=behind_prompt + response.context_tokens,
            )
            collector.answer(one, answer.before, answer.standing, end=end)

    def _open(self, one: ResponseId, collector: FlightCollector, *, waits: bool) -> None:
        response, prompt = collector.responses[one], self._prompt_at(one.ordinal)
        assert response.episode is not None
        turns = response.drawn_turns
        if one not in self._known and (turns or not waits):
            answered = turns[:-1] if waits else turns
            self._episodes.reopen(prompt, one.index, answered, response.episode.standing)
        self._known.add(one)
        if not waits:
            return
        if turns:
            self._asked[one] = self._episodes.step(prompt, one.index, turns[-1])
        else:
            self._asked[one] = self._episodes.start(prompt, one.index)

    def _takes(self, one: ResponseId) -> bool:
        """Whether this process has the episode."""
        return self._share.grades and self._share.takes(one.ordinal)
