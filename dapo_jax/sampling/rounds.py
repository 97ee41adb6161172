"""Responses that go on from round to round: in each, every one of them draws up to as many tokens as the round has.

Between two rounds they pause: in their slots, or where there are more of them than slots, beside them with their pages, so that they take turns. What
is drawn does not depend on that.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, PRNGKeyArray, PyTree

from dapo_jax.dapo.episode_limits import EpisodeLimits
from dapo_jax.dapo.in_flight import Drawn, PresentTurn
from dapo_jax.dapo.rollouts import Continuation, FinishReason, Prompt
from dapo_jax.sampling.continuous_batching import check_prompts
from dapo_jax.sampling.decode_loop import DecodeLoop, StopRule
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.requests import Request


@dataclass(frozen=True, kw_only=True)
class Going:
    """A response that is in flight."""

    prompt: Prompt
    index: int
    tokens: Int[np.ndarray, " drawn"]
    """Tokens of the response so far; looked at when it comes for the first time, or begins a turn."""
    turn: PresentTurn | None = None
    """The turn that it draws; None where responses are no episodes."""


class RoundSampler:
    """Draws for responses in flight, round by round, as long as the weights are the same."""

    def __init__(
        self,
        engine: Engine,
        params: PyTree,
        *,
        key: PRNGKeyArray,
        decoding: Decoding,
        max_response_tokens: int,
        stop: StopRule | None = None,
        refill_frac: float = 0.125,
        on_look: Callable[[], None] = lambda: None,
        limits: EpisodeLimits | None = None,
    ) -> None:
        """See `Sampler`. What was drawn by earlier weights is read again by these, prompt and tokens together. With `limits` responses are episodes, of which a round draws tokens of
        one turn at most."""
        self._engine, self._limit, self._limits = engine, max_response_tokens, limits
        self._unread: deque[list[Request]] = deque()
        self._requests: dict[tuple[int, int], Request] = {}
        self._between: dict[tuple[int, int], Request] = {}
        """Episodes between two turns, whose pages stay until others need them."""
        self._loop = DecodeLoop(
            engine,
            params,
            key=key,
            decoding=decoding,
            stop=stop,
            refill_frac=refill_frac,
            on_look=on_look,
            more=self._more,
            park=limits is not None and engine.feed_tokens > 0,
        )

    def draw(
        self, going: Sequence[Going], tokens: int, *, waiting: Collection[tuple[int, int]] = ()
    ) -> list[Drawn]:
        """One round of `tokens` tokens, in the order of `going`: every response that is in flight, those that are new among them, but for those whose environments work.

        Args:
            going: the responses that draw.
            tokens: the most that each of them draws.
            waiting: (ordinal, index) of the episodes whose environments work.

        Raises:
            ValueError: a prompt is empty, or leaves no room for a response in a slot; or one of those that paused is missing.
        """
        check_prompts(
            [each.prompt for each in going],
            capacity=self._engine.capacity,
            max_response_tokens=self._limit,
        )
        requests = [self._request(each) for each in going]
        if missing := self._requests.keys() - {(each.prompt.ordinal, each.index) for each in going}:
            raise ValueError(
                f"responses that pause have to go on, or their slots stay taken: {sorted(missing)} are missing"
            )
        for name in self._between.keys() - set(waiting):  # those are over
            self._loop.slots.forget(self._between.pop(name))
        begin = [request.drawn for request in requests]
        for request in requests:
            request.target = min(request.drawn + tokens, request.limit)
        self._line_up(requests)
        ended: dict[int, FinishReason] = {}
        while (found := self._loop.step()) is not None:
            for request, length, reason in found:
                request.drawn, ended[id(request)] = length, reason
                name = request.prompt.ordinal, request.index
                del self._requests[name]
                if self._limits is not None:
                    self._between[name] = request
        assert all(request.paused for request in self._requests.values()), "a response was left behind"
        return [
            Drawn(
                tokens=request.tokens[first : request.drawn].copy(),
                logprobs=request.logprobs[first : request.drawn].copy(),
                finish_reason=ended.get(id(request)),
            )
            for request, first in zip(requests, begin, strict=True)
        ]

    def close(self) -> None:
        """Lets cache and weights go: the loop knows this object, and would stay until cycles are collected."""
        self._loop.close()

    def _request(self, going: Going) -> Request:
        name = going.prompt.ordinal, going.index
        if name in self._requests:
            return self._requests[name]
        if (request := self._between.pop(name, None)) is None:
            most = 0 if self._limits is None else self._limits.episode_tokens
            request = Request(going.prompt, going.index, self._limit, most=most)
            if len(going.tokens):
                request.append(going.tokens, np.zeros(len(going.tokens), np.float32))
            if self._limits is not None and going.turn is not None:
                request.turn, request.begun, request.anew = going.turn
                request.limit = self._limits.turn_end(request.begun, ahead=request.ahead)
        elif self._limits is not None and going.turn is not None:
            said = Continuation(going.tokens[request.drawn :], anew=going.turn.anew == request.drawn)
            request.begin_turn(going.turn.number, said, self._limits)
        self._requests[name] = request
        return request

    def _line_up(self, requests: Sequence[Request]) -> None:
        """Puts those beside the slots first, which have pages; the others are read, those that begin with the same tokens together."""
        slots = self._loop.slots
        in_slots = {id(owner) for owner in slots.owners if owner is not None}
        for request in requests:
            if id(request) in in_slots:
                continue
            if request.prefix is not None:
                self._loop.waiting.append(request)
                slots.aside.remove(request)
            elif self._loop.resume(request):
                continue
            elif self._unread and self._begins_alike(self._unread[-1][0], request):
                self._unread[-1].append(request)
            else:
                self._unread.append([request])

    def _begins_alike(self, one: Request, other: Request) -> bool:
        if one.prompt.ordinal != other.prompt.ordinal or one.turn or other.turn:
            return False
        # Before the first token is drawn there is only what environments begin with.
        same = one.drawn == one.begun == other.drawn == other.begun and one.anew == other.anew
        return same and bool((one.tokens[: one.drawn] == other.tokens[: one.drawn]).all())

    def _more(self) -> list[list[Request]]:
        # All of it: what was read starts before more is, and is not read while nothing can start.
        unread, self._unread = list(self._unread), deque()
        return unread
