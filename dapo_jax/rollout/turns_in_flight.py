"""Episodes in flight: their turns are sampled round by round, and an environment's answer is taken a fixed number of rounds later, in every process at once.

So tokens depend on the answers of environments, and not on their time. The process that grades a group talks with its environments.
"""

from collections.abc import Callable
from concurrent.futures import wait

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.environments import Episodes
from dapo_jax.health.stalls import Watch
from dapo_jax.rollout.collector import Collector
from dapo_jax.rollout.exchange import Answered, Exchange
from dapo_jax.rollout.virtual_clock import ResponseId
from dapo_jax.sampling.turns import Answer

FOR_OTHERS = "waiting for the groups of the other processes"

_LOOK_S = 1.0


class TurnsInFlight:
    """The environments of a run whose episodes are in flight."""

    def __init__(
        self, episodes: Episodes, exchange: Exchange, prompt_at: Callable[[int], Prompt], watch: Watch
    ) -> None:
        """`watch` is notified, every second at least, while environments work."""
        self._episodes, self._exchange = episodes, exchange
        self._prompt_at, self._watch = prompt_at, watch
        self._asked: dict[ResponseId, Answer] = {}
        self._known: set[ResponseId] = set()
        """The episodes of this process that are open."""

    def ask(self, collector: Collector) -> None:
        """Hands over starts and turns that environments have not heard. Opens episodes that this process does not know, such as those of a checkpoint."""
        for one, request in collector.responses.items():
            if not self._takes(one) or (one in self._known and (not request.waits or one in self._asked)):
                continue
            prompt, turns = request.prompt, request.drawn_turns
            if one not in self._known and (turns or not request.waits):
                answered = turns[:-1] if request.waits else turns
                self._episodes.reopen(prompt, one.index, answered, request.standing)
            self._known.add(one)
            if request.waits and turns:
                self._asked[one] = self._episodes.step(prompt, one.index, turns[-1])
            elif request.waits:
                self._asked[one] = self._episodes.start(prompt, one.index)
        self._known &= collector.responses.keys()

    def hear(self, collector: Collector) -> None:
        """Takes the answers that are due, in every process.

        Raises:
            StoppedError: one of the processes was told to stop; in all of them.
            RewardError: a reward function failed in one of them; in all.
        """
        due = collector.answers_due()
        if not due:
            return
        answers: dict[ResponseId, Answered] = {}
        with self._exchange.working():
            mine = {one: self._asked[one] for one in due if self._takes(one)}
            while wait(mine.values(), timeout=_LOOK_S).not_done:
                self._watch.note("waiting for environments")
            for one, answer in mine.items():
                standing = self._episodes.standing(self._prompt_at(one.ordinal), one.index)
                answers[one] = Answered(before=answer.result(), standing=standing)
                del self._asked[one]
        self._watch.note(FOR_OTHERS, for_others=True)
        found = self._exchange.answers(answers)
        for one in due:
            collector.answer(one, found[one].before, found[one].standing)

    def _takes(self, one: ResponseId) -> bool:
        """Returns whether this process has the episode."""
        return self._exchange.grades and self._exchange.takes(one.ordinal)
