"""Responses in flight: what has been drawn of each so far, and what goes on from one step to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.dapo.rollouts import (
    ContextSpan,
    Continuation,
    DrawnTurn,
    FinishReason,
    Lost,
    Response,
    Span,
    TurnSpan,
)
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
    """None if the response goes on; of an episode, if its present turn does."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """All that an environment has said of an episode so far, but for the tokens."""

    rewards: tuple[float, ...] = ()
    """The reward of each turn that it has answered."""
    correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    lost: Lost | str = ""
    reason: str = ""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Standing":
        """The standing that `dataclasses.asdict` took apart, perhaps by way of JSON.

        Raises:
            TypeError, KeyError: it has other fields.
        """
        fields: dict[str, Any] = {**said, "rewards": tuple(said["rewards"])}
        return cls(**fields)


class PresentTurn(NamedTuple):
    """The turn that an episode draws, as the sampler needs to know it."""

    number: int
    """From 0."""
    begun: int
    """Tokens of the episode before it."""
    anew: int | None
    """The token with which its context begins; None: that begins with the prompt."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSoFar:
    """The turns of a response that talks with an environment."""

    due: int | None
    """The round at whose end the environment's answer is taken; None: a turn is drawn, or the episode is over."""
    turns: tuple[TurnSpan, ...] = ()
    """The turns that have ended."""
    reasons: tuple[FinishReason, ...] = ()
    """The reason for which each of them did."""
    contexts: tuple[ContextSpan, ...] = ()
    """The contexts that begin anew."""
    begun: int = 0
    """Tokens of the episode before the turn that is drawn."""
    standing: Standing = field(default_factory=Standing)


@dataclass(frozen=True, kw_only=True)
class ResponseSoFar:
    """A response on its way through the rounds."""

    tokens: Int[np.ndarray, " drawn"]
    logprobs: Float[np.ndarray, " drawn"]
    spans: tuple[Span, ...]
    """The weights that drew its tokens; none yet, none."""
    finish_reason: FinishReason | None
    """None as long as it is in flight."""
    episode: EpisodeSoFar | None = None
    """None: it is one turn, and there is no environment."""

    @property
    def context_tokens(self) -> int:
        """Tokens of its present context, but for those of the prompt where that begins it."""
        contexts = self.episode.contexts if self.episode else ()
        return len(self.tokens) - (contexts[-1].first if contexts else 0)

    @property
    def present_turn(self) -> PresentTurn | None:
        """The turn that it draws; None where there is no environment."""
        if self.episode is None:
            return None
        turns, contexts = self.episode.turns, self.episode.contexts
        return PresentTurn(len(turns), self.episode.begun, contexts[-1].first if contexts else None)

    @property
    def drawn_turns(self) -> list[DrawnTurn]:
        """The turns that have ended, as an environment hears them."""
        assert self.episode is not None
        return [
            DrawnTurn(
                tokens=self.tokens[first:stop], logprobs=self.logprobs[first:stop], finish_reason=reason
            )
            for (first, stop), reason in zip(self.episode.turns, self.episode.reasons, strict=True)
        ]

    def turn_ended(self, drawn: Drawn, *, due: int) -> "ResponseSoFar":
        """The same, of which `drawn` was the end of a turn; the answer to it is taken at the end of round `due`."""
        assert self.episode is not None
        assert drawn.finish_reason is not None
        turn = TurnSpan(self.episode.begun, len(self.tokens))
        turns, reasons = (*self.episode.turns, turn), (*self.episode.reasons, drawn.finish_reason)
        episode = replace(self.episode, due=due, turns=turns, reasons=reasons)
        return replace(self, finish_reason=None, episode=episode)

    def answered(
        self, before: Continuation | None, standing: Standing, end: FinishReason | None, version: int
    ) -> "ResponseSoFar":
        """The same with what its environment has said: `before` stands before the next turn, unless the episode has come to its `end`."""
        assert self.episode is not None
        episode = replace(self.episode, due=None, standing=standing)
        if end is not None:
            return replace(self, finish_reason=end, episode=episode)
        assert before is not None
        first, count = len(self.tokens), len(before.tokens)
        contexts = (*episode.contexts, ContextSpan(first, first + count)) if before.anew else episode.contexts
        said = Drawn(tokens=before.tokens, logprobs=np.zeros(count, np.float32), finish_reason=None)
        episode = replace(episode, contexts=contexts, begun=first + count)
        return replace(self.longer(said, version), episode=episode)

    def longer(self, drawn: Drawn, version: int) -> "ResponseSoFar":
        """The same with what a round drew by weights of that version."""
        spans = self.spans
        if len(drawn.tokens) and (not spans or spans[-1].version != version):
            spans = (*spans, Span(len(self.tokens), version))
        return replace(
            self,
            tokens=np.concatenate([self.tokens, drawn.tokens]),
            logprobs=np.concatenate([self.logprobs, drawn.logprobs]),
            spans=spans,
            finish_reason=drawn.finish_reason,
        )

    def whole(self, version: int) -> Response:
        """The response, which has ended. One without a token, an episode that was lost before its first turn, is of the `version` at which its group began."""
        assert self.finish_reason is not None
        return Response(
            tokens=self.tokens,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            spans=self.spans or (Span(0, version),),
            turns=self.episode.turns if self.episode else (),
            contexts=self.episode.contexts if self.episode else (),
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
