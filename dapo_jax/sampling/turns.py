"""Multi-turn episodes in a sampler that runs every response to its end: a finished turn is passed to its environment, and the environment's answer is
prefilled before the next turn.

While its environment works, an episode has no slot, and it keeps its pages only until other responses need them. No token is tokenized twice.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Protocol, runtime_checkable

from dapo_jax.dapo.rollouts import Continuation, DrawnTurn, FinishReason, Prompt
from dapo_jax.sampling.requests import EpisodeLimits, Request, by_context

_LOOK_S = 1.0
"""Interval in seconds at which a sampler calls `on_look` while it waits for environments."""

Answer = Future[Continuation | None]
"""The environment's tokens before the next turn, or None if the episode is over or was lost."""


@runtime_checkable
class Environments(Protocol):
    """The sampler's interface to the environments of a run."""

    max_turns: int
    turn_tokens: int
    """Maximum number of tokens in a turn; 0: as many as the episode may have."""
    episode_tokens: int
    """Maximum number of tokens in an episode; 0: as many as a response may have."""

    def start(self, prompt: Prompt, index: int) -> Answer:
        """Begins an episode. The answer, which may be empty, comes before the first turn: after the prompt or in place of it."""
        ...

    def step(self, prompt: Prompt, index: int, turn: DrawnTurn) -> Answer:
        """Passes a finished turn to its environment."""
        ...


def limits_of(environments: Environments, *, max_response_tokens: int, capacity: int) -> EpisodeLimits:
    """Returns the limits of episodes whose contexts have at most `capacity` tokens."""
    return EpisodeLimits(
        max_turns=environments.max_turns,
        turn_tokens=environments.turn_tokens,
        episode_tokens=environments.episode_tokens or max_response_tokens,
        capacity=capacity,
    )


class TurnTaking:
    """The episodes of one sampler that wait for their environments."""

    def __init__(
        self, environments: Environments, limits: EpisodeLimits, on_look: Callable[[], None]
    ) -> None:
        """`on_look` is called every second while all episodes wait."""
        self._environments, self._limits, self._on_look = environments, limits, on_look
        self._arrived: SimpleQueue[tuple[Request, Answer]] = SimpleQueue()
        self._ended: list[Request] = []
        self._continuing: list[Request] = []
        self._pending = 0
        self.starting = 0
        """Number of episodes whose environment has not returned its first answer."""

    @property
    def busy(self) -> bool:
        """Whether any episode without a slot is not over yet."""
        return self._pending > 0 or bool(self._continuing)

    def start(self, requests: Sequence[Request]) -> None:
        """Begins an episode for each request."""
        self.starting += len(requests)
        for request in requests:
            self._await(request, self._environments.start(request.prompt, request.index))

    def end_turn(self, request: Request, reason: FinishReason) -> None:
        """Ends the current turn with the finish reason `reason` and passes it to its environment."""
        turn = request.end_turn(reason)
        self._await(request, self._environments.step(request.prompt, request.index, turn))

    def resume(self, resumed: Callable[[Request], bool]) -> None:
        """Calls `resumed` for each episode that continues. If it returns False, the episode must be prefilled; see `continuing`."""
        self._take()
        self._continuing = [request for request in self._continuing if not resumed(request)]

    def continuing(self) -> list[list[Request]]:
        """Returns the episodes to prefill, in lists that share a context."""
        continuing, self._continuing = self._continuing, []
        return by_context(continuing)

    def ended(self) -> list[Request]:
        """Returns the episodes that are over."""
        self._take()
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        """Waits until an environment has answered."""
        while self._pending and not (self._continuing or self._ended):
            try:
                self._took(*self._arrived.get(timeout=_LOOK_S))
            except Empty:
                self._on_look()

    def _await(self, request: Request, answer: Answer) -> None:
        self._pending += 1
        answer.add_done_callback(lambda done: self._arrived.put((request, done)))

    def _take(self) -> None:
        while not self._arrived.empty():
            self._took(*self._arrived.get())

    def _took(self, request: Request, answer: Answer) -> None:
        self._pending -= 1
        self.starting -= not request.turns
        request.take_answer(answer.result(), self._limits)
        (self._continuing if request.finish_reason is None else self._ended).append(request)
