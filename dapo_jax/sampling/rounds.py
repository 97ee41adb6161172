"""Responses that go on from round to round: in each, every one of them draws up to as many tokens as the round has.

Between two rounds they pause: in their slots, or where there are more of them than slots, beside them with their pages, so that they take turns. What
is drawn does not depend on that.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, PRNGKeyArray, PyTree

from dapo_jax.dapo.in_flight import Drawn
from dapo_jax.dapo.rollouts import FinishReason, Prompt
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
    """Drawn before; looked at when it comes for the first time."""


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
    ) -> None:
        """See `Sampler`. What was drawn by earlier weights is read again by these, prompt and tokens together."""
        self._engine, self._limit = engine, max_response_tokens
        self._unread: deque[list[Request]] = deque()
        self._requests: dict[tuple[int, int], Request] = {}
        self._loop = DecodeLoop(
            engine,
            params,
            key=key,
            decoding=decoding,
            stop=stop,
            refill_frac=refill_frac,
            on_look=on_look,
            more=self._more,
            read_first=True,
        )

    def draw(self, going: Sequence[Going], tokens: int) -> list[Drawn]:
        """One round of `tokens` tokens, in the order of `going`: every response that is in flight, those that are new among them.

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
        begin = [request.drawn for request in requests]
        for request in requests:
            request.target = min(request.drawn + tokens, self._limit)
        self._line_up(requests)
        ended: dict[int, tuple[int, FinishReason]] = {}
        while (found := self._loop.step()) is not None:
            for request, length, reason in found:
                ended[id(request)] = length, reason
                del self._requests[request.prompt.ordinal, request.index]
        assert all(request.paused for request in self._requests.values()), "a response was left behind"
        return [
            self._drawn(request, first, ended.get(id(request)))
            for request, first in zip(requests, begin, strict=True)
        ]

    def _request(self, going: Going) -> Request:
        name = going.prompt.ordinal, going.index
        if name not in self._requests:
            request = self._requests[name] = Request(going.prompt, going.index, self._limit)
            if len(going.tokens):
                request.append(going.tokens, np.zeros(len(going.tokens), np.float32))
        return self._requests[name]

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
            elif not request.drawn and self._unread and self._begins_alike(self._unread[-1][0], request):
                self._unread[-1].append(request)
            else:
                self._unread.append([request])

    def _begins_alike(self, one: Request, other: Request) -> bool:
        return not one.drawn and one.prompt.ordinal == other.prompt.ordinal

    def _more(self) -> list[list[Request]]:
        # All of it: what was read starts before more is, and is not read while nothing can start.
        unread, self._unread = list(self._unread), deque()
        return unread

    def _drawn(self, request: Request, first: int, ended: tuple[int, FinishReason] | None) -> Drawn:
        last, reason = ended or (request.drawn, None)
        return Drawn(
            tokens=request.tokens[first:last].copy(),
            logprobs=request.logprobs[first:last].copy(),
            finish_reason=reason,
        )
