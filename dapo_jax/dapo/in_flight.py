"""Responses in flight: what has been drawn of each so far, and what goes on from one step to the next."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.dapo.rollouts import FinishReason, Response, Span
from dapo_jax.dapo.virtual_clock import ResponseId, VirtualClock

FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""The numbers by which files and messages tell why a response has ended; None: it goes on."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The part of a response that a round drew."""

    tokens: Int[np.ndarray, " new"]
    logprobs: Float[np.ndarray, " new"]
    """In nats, at the sampling temperature, under the weights of the round."""
    finish_reason: FinishReason | None
    """None if the response goes on."""


@dataclass(frozen=True, kw_only=True)
class ResponseSoFar:
    """A response on its way through the rounds."""

    tokens: Int[np.ndarray, " drawn"]
    logprobs: Float[np.ndarray, " drawn"]
    spans: tuple[Span, ...]
    """The weights that drew its tokens; none yet, none."""
    finish_reason: FinishReason | None
    """None as long as it is in flight."""

    def longer(self, drawn: Drawn, version: int) -> "ResponseSoFar":
        """The same with what a round drew by weights of that version."""
        spans = self.spans
        if len(drawn.tokens) and (not spans or spans[-1].version != version):
            spans = (*spans, Span(len(self.tokens), version))
        return ResponseSoFar(
            tokens=np.concatenate([self.tokens, drawn.tokens]),
            logprobs=np.concatenate([self.logprobs, drawn.logprobs]),
            spans=spans,
            finish_reason=drawn.finish_reason,
        )

    @property
    def whole(self) -> Response:
        """The response, which has ended."""
        assert self.finish_reason is not None
        return Response(
            tokens=self.tokens,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            spans=self.spans,
        )


NOTHING = ResponseSoFar(
    tokens=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), spans=(), finish_reason=None
)
"""A response that starts."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Rollouts that go on from one step to the next, as a checkpoint keeps them; groups that wait to be trained on are none of them."""

    clock: VirtualClock
    """Not to be changed: `VirtualClock.copy` is."""
    responses: Mapping[ResponseId, ResponseSoFar]
    """The responses to groups without a verdict that have started, in flight or ended."""
