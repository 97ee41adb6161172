"""Samples responses in flight in rounds: in each round, every response samples up to a fixed number of tokens and then pauses.

A paused response stays in its slot. If there are more responses than slots, they share the slots and keep their pages in between. Sharing slots
does not change their tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import FinishReason
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.sampling.continuous_batching import check_prompts
from dapo_jax.sampling.decode_loop import DecodeLoop, StopRule
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.requests import EpisodeLimits, Request, by_context


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The tokens that a round sampled for one response."""

    record: Tokens
    """The last `new` tokens are new. Before them are older tokens that the model processed only now: the last token of the previous round, and tokens that an environment
    appended. Without values that come with processing, there are no older tokens."""
    new: int
    finish_reason: FinishReason | None
    """None if the response, or the current turn of an episode, has not ended."""
    prompt_values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """See `Response.prompt_values`. Empty if they are from an earlier round."""

    def append_to(self, request: Request) -> None:
        """Appends the new tokens to a request that another sampler's copy continued."""
        known = len(self.record) - self.new
        request.record.fill(request.drawn - known, self.record.cut(0, known).processed)
        request.append(self.record.cut(known))
        request.prompt_values = request.prompt_values or self.prompt_values


class RoundSampler:
    """Samples in-flight responses round by round, with one set of weights."""

    def __init__(
        self,
        engine: Engine,
        params: PyTree,
        *,
        key: PRNGKeyArray,
        decoding: Decoding,
        max_response_tokens: int,
        stop: StopRule | None = None,
        on_look: Callable[[], None] = lambda: None,
        limits: EpisodeLimits | None = None,
    ) -> None:
        """For the parameters, see `Sampler`. A prefill covers the prompt and all tokens that earlier weights sampled. With `limits`, responses are
        episodes, and a round samples at most one turn of each episode."""
        self._engine, self._limit, self._limits = engine, max_response_tokens, limits
        self._unread: list[Request] = []
        self._between: set[Request] = set()
        """Episodes between two turns. They keep their pages until other responses need them."""
        park = limits is not None and engine.feed_tokens > 0
        self._loop = DecodeLoop(
            engine, params, key=key, decoding=decoding, more=self._more, stop=stop, on_look=on_look, park=park
        )

    def draw(self, requests: Sequence[Request], tokens: int) -> list[Drawn]:
        """Samples one round: at most `tokens` tokens for each response. They are appended to the requests and returned in the same order.

        The requests are all responses in flight, whether new or paused, except episodes whose environment is working. Raises ValueError if a prompt is empty, or leaves no
        room for a response in a slot.
        """
        prompts, capacity = [request.prompt for request in requests], self._engine.capacity
        check_prompts(prompts, capacity=capacity, max_response_tokens=self._limit)
        for over in [request for request in self._between if request.finish_reason is not None]:
            self._loop.slots.forget(over)
            self._between.remove(over)
        begin = [(request.drawn, request.record.settled, bool(request.prompt_values)) for request in requests]
        for request in requests:
            request.limit = self._limit if self._limits is None else self._limits.turn_end(request)
            request.target = min(request.drawn + tokens, request.limit)
        self._line_up(requests)
        ended: dict[Request, FinishReason] = {}
        while (of_step := self._loop.step()) is not None:
            ended.update(of_step)
        self._between.difference_update(requests)
        if self._limits is not None:
            self._between.update(ended)
        return [
            Drawn(
                record=request.record.cut(settled if request.record.processed else drawn).copy(),
                new=request.drawn - drawn,
                finish_reason=ended.get(request),
                prompt_values={} if has_prompt else request.prompt_values,
            )
            for request, (drawn, settled, has_prompt) in zip(requests, begin, strict=True)
        ]

    def close(self) -> None:
        """Frees the cache and the weights. Otherwise, a reference cycle would keep them in memory until garbage collection."""
        self._loop.close()

    def _line_up(self, requests: Sequence[Request]) -> None:
        """Queues the responses that can continue from their pages. Collects all others for `_more`, which the loop calls to prefill them."""
        slots = self._loop.slots
        in_slots = {owner for owner in slots.owners if owner is not None}
        for request in requests:
            if request in in_slots:
                continue
            if request.prefix is not None:
                self._loop.waiting.append(request)
                slots.aside.remove(request)
            elif not self._loop.resume(request):
                self._unread.append(request)

    def _more(self) -> list[list[Request]]:
        # All requests are returned at once. The loop does not prefill further requests while a prefilled request waits to start.
        unread, self._unread = self._unread, []
        return by_context(unread)
