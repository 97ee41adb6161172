"""Continuous batching: samples groups of complete responses or multi-turn episodes, with one prefill for all responses to a prompt."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Protocol, runtime_checkable

from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import Continuation, DrawnTurn, FinishReason, Prompt, Response
from dapo_jax.sampling.decode_loop import DecodeLoop, StopRule
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.requests import EpisodeLimits, Request, by_context

Draw = Callable[[int], Sequence[Prompt]]
"""Function that receives n and returns up to n prompts to sample next. Sampling ends when it returns an empty list and all earlier responses have ended."""

_LOOK_S = 1.0
"""Interval in seconds at which a sampler calls `on_look` while it waits for environments."""

Answer = Future[Continuation | None]
"""Future of an environment's answer: the tokens to add before the next turn, or None if the episode is over or was lost."""


@runtime_checkable
class Environments(Protocol):
    """The sampler's interface to the environments of a run."""

    max_turns: int
    turn_tokens: int
    """Maximum number of tokens in a turn. 0 means that only the episode's limit applies."""
    episode_tokens: int
    """Maximum number of tokens in an episode. 0 means that the limit on response tokens applies."""

    def start(self, prompt: Prompt, index: int) -> Answer:
        """Begins an episode. The answer may contain tokens to add before the first turn; they are appended to the prompt or replace it."""
        ...

    def step(self, prompt: Prompt, index: int, turn: DrawnTurn) -> Answer:
        """Passes a finished turn to its environment and returns a future of the answer."""
        ...


def limits_of(environments: Environments, *, max_response_tokens: int, capacity: int) -> EpisodeLimits:
    """Returns the limits that `environments` set, with the sampler's limits as defaults. A context has at most `capacity` tokens."""
    return EpisodeLimits(
        max_turns=environments.max_turns,
        turn_tokens=environments.turn_tokens,
        episode_tokens=environments.episode_tokens or max_response_tokens,
        capacity=capacity,
    )


class Sampler:
    """Samples groups of responses with an engine, by continuous batching."""

    def __init__(
        self,
        engine: Engine,
        *,
        prefill_prompts: int = 16,
        refill_frac: float = 0.125,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """Up to `prefill_prompts` prompts are prefilled together. Slots are refilled once a fraction `refill_frac` of the live slots has become free.
        `on_look` is called before every engine call that samples tokens."""
        self._engine, self._prefill_prompts = engine, prefill_prompts
        self._refill_frac, self._on_look = refill_frac, on_look

    def sample(
        self,
        params: PyTree,
        draw: Draw,
        *,
        key: PRNGKeyArray,
        decoding: Decoding,
        samples_per_prompt: int,
        max_response_tokens: int,
        stop: StopRule | None = None,
        version: int = 0,
        environments: Environments | None = None,
    ) -> Iterator[tuple[Prompt, tuple[Response, ...]]]:
        """Yields each prompt with its responses as soon as all responses to it have ended. `version` is the version of `params`.

        Responses depend only on `params`, `key`, the ordinals, `decoding` and `stop`, not on slots, order or timing. With an 8-bit KV cache, they also depend
        on which responses are preempted, because a re-prefill attends to keys that are not yet rounded to 8 bits.

        `stop` ends a response at a stop string. With `environments`, each response is an episode of several turns, and `stop` ends a turn. An episode
        has at most `max_response_tokens` tokens, including tokens from the environment, unless the environments set another limit.

        Raises:
            ValueError: a prompt is empty, or leaves no room for `max_response_tokens` in a slot.
        """
        groups: dict[int, dict[int, Response]] = {}
        capacity, taking = self._engine.capacity, None
        if environments is not None:
            limits = limits_of(environments, max_response_tokens=max_response_tokens, capacity=capacity)
            taking = TurnTaking(environments, limits, self._on_look)

        def more() -> list[list[Request]]:
            if taking is not None:
                continuing = taking.continuing(loop.resume)
                if continuing or taking.starting or loop.waiting:
                    return continuing
            prompts = draw(self._prefill_prompts)
            check_prompts(prompts, capacity=capacity, max_response_tokens=max_response_tokens)
            groups.update({prompt.ordinal: {} for prompt in prompts})
            new = partial(Request, limit=max_response_tokens, version=version)
            requests = [[new(prompt, at) for at in range(samples_per_prompt)] for prompt in prompts]
            if taking is None:
                return requests
            taking.start(list(chain.from_iterable(requests)))
            return taking.continuing(loop.resume)

        park = taking is not None and self._engine.feed_tokens > 0
        loop = DecodeLoop(
            self._engine, params, key=key, decoding=decoding, stop=stop, refill_frac=self._refill_frac,
            on_look=self._on_look, more=more, park=park,
        )  # fmt: skip
        try:
            while True:
                if taking is not None:
                    taking.resume(loop.resume)
                ended = loop.step()
                for request, reason in ended or ():
                    request.finish_reason = reason
                    if taking is not None:
                        taking.end_turn(request, reason)
                over = [request for request, _ in ended or ()] if taking is None else taking.ended()
                for request in over:
                    loop.slots.forget(request)
                    group = groups[request.prompt.ordinal]
                    group[request.index] = request.response(version)
                    if len(group) == samples_per_prompt:
                        del groups[request.prompt.ordinal]
                        yield request.prompt, tuple(group[index] for index in range(samples_per_prompt))
                if ended is None and not over:
                    if taking is None or not taking.busy:
                        return
                    taking.wait()
        finally:
            loop.close()


class TurnTaking:
    """Passes finished turns to environments and resumes episodes with the answers, for a sampler that runs every response to its end.

    While its environment works, an episode has no slot, and it keeps its pages only until other responses need them. No text is tokenized twice.
    """

    def __init__(
        self, environments: Environments, limits: EpisodeLimits, on_look: Callable[[], None]
    ) -> None:
        """`on_look` is called every second while all episodes wait for their environments."""
        self._environments, self._limits, self._on_look = environments, limits, on_look
        self._arrived: SimpleQueue[tuple[Request, Answer]] = SimpleQueue()
        self._ended: list[Request] = []
        self._continuing: list[Request] = []
        self._pending = 0
        self.starting = 0
        """Number of episodes that wait for their environment's first answer."""

    @property
    def busy(self) -> bool:
        """Whether any episode is waiting for its environment or for its next turn."""
        return self._pending > 0 or bool(self._continuing)

    def start(self, requests: Sequence[Request]) -> None:
        """Begins an episode for each request."""
        self.starting += len(requests)
        for request in requests:
            self._await(request, self._environments.start(request.prompt, request.index))

    def end_turn(self, request: Request, reason: FinishReason) -> None:
        """Ends the request's current turn with the finish reason `reason`, and passes the turn to the environment."""
        request.end_turn(reason)
        step = self._environments.step(request.prompt, request.index, request.drawn_turns[-1])
        self._await(request, step)

    def resume(self, resumed: Callable[[Request], bool]) -> None:
        """Calls `resumed` for each episode that has an answer to continue with. If `resumed` returns False, `continuing` returns the episode for prefill."""
        self._take()
        self._continuing = [request for request in self._continuing if not resumed(request)]

    def continuing(self, resumed: Callable[[Request], bool]) -> list[list[Request]]:
        """Calls `resume`, and returns the episodes that must be prefilled, in one list per context."""
        self.resume(resumed)
        continuing, self._continuing = self._continuing, []
        return by_context(continuing)

    def ended(self) -> list[Request]:
        """Returns the episodes that have ended since the last call."""
        self._take()
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        """Waits until at least one environment has answered."""
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


def check_prompts(prompts: Sequence[Prompt], *, capacity: int, max_response_tokens: int) -> None:
    """Checks that every prompt leaves room for a response in a slot of `capacity` tokens. Raises ValueError if a prompt is empty or too long."""
    for prompt in prompts:
        if not 0 < len(prompt.tokens) <= capacity - max_response_tokens:
            raise ValueError(
                f"prompt {prompt.ordinal} has {len(prompt.tokens)} tokens; a slot of {capacity} tokens has room for 1 to "
                f"{capacity} - {max_response_tokens} (response) = {capacity - max_response_tokens}"
            )
