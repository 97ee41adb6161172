"""Episodes of several turns: what ends a turn is handed to an environment, and what that appends is read before the next turn is drawn.

While an environment works, its episode has no slot, and pages only as long as no other needs them. What was drawn stays as it is: the next turn begins behind the very tokens of the
turns before and those that were appended, and nothing is tokenized again.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

from dapo_jax.dapo.episode_limits import EpisodeLimits
from dapo_jax.dapo.rollouts import ContextSpan, Continuation, DrawnTurn, FinishReason, Prompt, TurnSpan
from dapo_jax.sampling.requests import Request

_LOOK_S = 1.0
"""Seconds after which a sampler that waits for environments looks around."""


@runtime_checkable
class Environments(Protocol):
    """The environments of a run as the sampler sees them: futures of what they put before the next turn."""

    max_turns: int
    turn_tokens: int
    """The most tokens of a turn; 0: as many as the episode may have."""
    episode_tokens: int
    """The most tokens of an episode; 0: as many as a response may have."""

    def start(self, prompt: Prompt, index: int) -> Future[Continuation | None]:
        """Begins the episode: what stands before the first turn, behind the prompt or in its place, perhaps no tokens; None: it was lost."""
        ...

    def step(self, prompt: Prompt, index: int, turn: DrawnTurn) -> Future[Continuation | None]:
        """Hands over a turn: what stands before the next one; None: the episode is over."""
        ...


def limits_of(environments: Environments, *, max_response_tokens: int, capacity: int) -> EpisodeLimits:
    """The limits of episodes that are sampled in contexts of up to `capacity` tokens."""
    return EpisodeLimits(
        max_turns=environments.max_turns,
        turn_tokens=environments.turn_tokens,
        episode_tokens=environments.episode_tokens or max_response_tokens,
        capacity=capacity,
    )


class EndedEpisode(NamedTuple):
    """An episode that is over."""

    request: Request
    tokens: int
    reason: FinishReason
    turns: tuple[TurnSpan, ...]
    contexts: tuple[ContextSpan, ...]


@dataclass
class TurnTaking:
    """The episodes of one sampler that wait for their environments."""

    environments: Environments
    limits: EpisodeLimits
    on_look: Callable[[], None]
    """Called while it waits."""
    pending: int = 0
    """Episodes whose environment works."""
    starting: int = 0
    """The number of them that have not begun."""
    _arrived: SimpleQueue[tuple[Request, Future[Any]]] = field(default_factory=SimpleQueue)
    _turns: dict[int, list[TurnSpan]] = field(default_factory=dict)
    _reasons: dict[int, list[FinishReason]] = field(default_factory=dict)
    _contexts: dict[int, list[ContextSpan]] = field(default_factory=dict)
    _ended: list[EndedEpisode] = field(default_factory=list)
    _going: list[Request] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether an episode is not over that has no slot."""
        return self.pending > 0 or bool(self._going)

    def start(self, requests: Sequence[Request]) -> None:
        """Begins episodes."""
        for request in requests:
            for parts in (self._turns, self._reasons, self._contexts):
                parts[id(request)] = []
            self.starting += 1
            self._await(request, self.environments.start(request.prompt, request.index))

    def turn_ended(self, request: Request, length: int, reason: FinishReason) -> None:
        """Hands the turn with which a response now has `length` tokens to its environment."""
        request.drawn = length
        self._turns[id(request)].append(TurnSpan(request.begun, length))
        self._reasons[id(request)].append(reason)
        drawn = slice(request.begun, length)
        turn = DrawnTurn(
            tokens=request.tokens[drawn].copy(), logprobs=request.logprobs[drawn].copy(), finish_reason=reason
        )
        self._await(request, self.environments.step(request.prompt, request.index, turn))

    def resume(self, resumed: Callable[[Request], bool]) -> None:
        """Lets those go on whose next turn begins and that `resumed` takes; the others are to be read."""
        self._take()
        self._going = [request for request in self._going if not resumed(request)]

    def going_on(self) -> list[list[Request]]:
        """The episodes whose next turn can be read, those together that begin with the same tokens."""
        alike: dict[tuple[int, bytes], list[Request]] = {}
        for request in self._going:
            alike.setdefault((request.prompt.ordinal, request.sequence.tobytes()), []).append(request)
        self._going = []
        return list(alike.values())

    def ended(self) -> list[EndedEpisode]:
        """The episodes that are over."""
        self._take()
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        """Waits until an environment has answered."""
        while self.pending and not (self._going or self._ended):
            try:
                self._took(*self._arrived.get(timeout=_LOOK_S))
            except Empty:
                self.on_look()

    def _await(self, request: Request, answer: Future[Any]) -> None:
        self.pending += 1
        answer.add_done_callback(lambda done: self._arrived.put((request, done)))

    def _take(self) -> None:
        while not self._arrived.empty():
            self._took(*self._arrived.get())

    def _took(self, request: Request, answer: Future[Any]) -> None:
        one = id(request)
        before, turns, reasons, contexts = (
            answer.result(),
            self._turns[one],
            self._reasons[one],
            self._contexts[one],
        )
        self.pending -= 1
        self.starting -= not turns
        reason = self.limits.end(before, reasons=reasons, drawn=request.drawn, length=request.length)
        if reason is not None:
            del self._turns[one], self._reasons[one], self._contexts[one]
            self._ended.append(EndedEpisode(request, request.drawn, reason, tuple(turns), tuple(contexts)))
            return
        assert before is not None
        if before.anew:
            contexts.append(ContextSpan(request.drawn, request.drawn + len(before.tokens)))
        request.begin_turn(len(turns), before, self.limits)
        self._going.append(request)
