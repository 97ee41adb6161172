"""A response on its way through the sampler, and the prefill of its context."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import (
    ContextSpan,
    Continuation,
    DrawnTurn,
    FinishReason,
    Prompt,
    Response,
    Span,
    Standing,
    TurnSpan,
)
from dapo_jax.sampling.decoding import DecodingOptions
from dapo_jax.sampling.interface import Engine

NOTHING = np.zeros(0, np.int32)
"""No tokens."""

_NO_LOGPROBS = np.zeros(0, np.float32)
_NO_STANDING = Standing()

_FIRST_TOKENS = 256
"""The buffer of a response begins with room for so many tokens."""

StopRule = Callable[[np.ndarray, int], int | None]
"""(tokens of a response so far, number of them in the call before) -> number of tokens at which the response ends, or None."""


@dataclass(frozen=True, kw_only=True)
class OwnOptions:
    """The options of one request, where requests differ."""

    decoding: DecodingOptions
    key: PRNGKeyArray | None = None
    """Key of the response, in place of the loop's key and the prompt's ordinal; None: these."""
    stop: StopRule | None = None


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """The most turns and tokens of an episode. A turn needs room for its environment's tokens and for one token of its own."""

    max_turns: int
    turn_tokens: int
    """The most tokens of a turn; 0: as many as the episode may have."""
    episode_tokens: int
    """The most tokens of an episode, the environment's included."""
    capacity: int
    """The most tokens of a context."""

    def end(self, request: "Request", before: Continuation | None) -> FinishReason | None:
        """Returns why an episode is over, or None if its next turn begins after the tokens `before`.

        An episode that its environment ends counts as cut off if the limit of tokens cut its last turn, as a response without an environment does.
        An episode without room for a first turn is over at once.

        Args:
            request: the episode, whose last turn has ended.
            before: the environment's tokens before the next turn; None: the environment ends the episode, or the episode was lost.
        """
        if before is None:
            cut = request.drawn >= self.episode_tokens and request.reasons[-1:] == ("length",)
            return "length" if cut else "stop"
        context = len(before.tokens) + (0 if before.anew else request.length)
        if len(before.tokens) < self.episode_tokens - request.drawn and context < self.capacity:
            return None if len(request.turns) < self.max_turns else "length"
        return "length" if request.turns else "stop"

    def turn_end(self, request: "Request") -> int:
        """Returns the number of tokens of the episode at which its present turn ends at the latest."""
        most = request.begun + (self.turn_tokens or self.episode_tokens)
        return min(self.episode_tokens, most, self.capacity - request.ahead)


@dataclass(eq=False)
class Request:
    """One response from its request to its end: in line, in a slot, between two turns or rounds, or in a checkpoint.

    A response that talks with an environment is an episode of several turns. Only the fields up to `tokens` outlive the sampler (`rest`).
    """

    prompt: Prompt
    index: int
    limit: int
    """Number of tokens at which the response, or the present turn of an episode, ends."""
    target: int = 0
    """Number of tokens at which it pauses; by default the limit."""
    version: int = 0
    """Version of the weights that sample: steps done."""
    drawn: int = 0
    """Number of tokens so far, the environment's included."""
    begun: int = 0
    """Number of tokens before the present turn."""
    spans: tuple[Span, ...] = ()
    """Weights that sampled its tokens; empty without a token."""
    turns: tuple[TurnSpan, ...] = ()
    """Turns of an episode that have ended."""
    reasons: tuple[FinishReason, ...] = ()
    """Why each of these turns ended."""
    contexts: tuple[ContextSpan, ...] = ()
    """Contexts that environments put in place of everything before them."""
    due: int | None = None
    """In flight: the round at whose end the environment's answer is taken; None: a turn is being sampled, or the episode is over."""
    standing: Standing = field(default_factory=lambda: _NO_STANDING)
    """The environment's account of an episode in flight."""
    finish_reason: FinishReason | None = None
    """None until the response, or the whole episode, has ended."""
    tokens: Int[np.ndarray, " room"] = field(default_factory=lambda: NOTHING)
    """A buffer: the first `drawn` entries are the response."""
    logprobs: Float[np.ndarray, " room"] = field(default_factory=lambda: _NO_LOGPROBS)
    prefix: PyTree = None
    """The prefix that waits to be inserted; None: nothing is prefilled, or the prefix was inserted."""
    place: int = 0
    """Place of its prompt in the prefix."""
    order: int = -1
    """The order in which responses started; -1: not yet."""
    row: int | None = None
    """Its row of the page table, as long as it holds pages."""
    fed: Int[np.ndarray, " fed"] = field(default_factory=lambda: NOTHING)
    """Tokens that are not in its pages, and that it is fed before it samples."""
    options: OwnOptions | None = None
    """None: the options of the loop."""
    dropped: bool = False
    """Its caller no longer waits for it."""

    def __post_init__(self) -> None:
        self.target = self.target or self.limit

    @property
    def turn(self) -> int:
        """Number of the present turn of an episode, from 0."""
        return len(self.turns)

    @property
    def anew(self) -> int | None:
        """The token with which its present context begins; None: the context begins with the prompt."""
        return self.contexts[-1].first if self.contexts else None

    @property
    def ahead(self) -> int:
        """Offset from a token's place in the response to its place in the context."""
        return len(self.prompt.tokens) if self.anew is None else -self.anew

    @property
    def length(self) -> int:
        """Number of tokens of its context: prompt and response so far."""
        return self.ahead + self.drawn

    @property
    def paused(self) -> bool:
        """True if it has as many tokens as it may have for now."""
        return self.drawn >= self.target

    @property
    def waits(self) -> bool:
        """True if an episode in flight samples nothing because its environment works."""
        return self.due is not None

    def room(self, steps: int) -> int:
        """Number of tokens that its context may have after a call that samples `steps`."""
        return self.ahead + min(self.drawn + steps, self.target)

    @property
    def sequence(self) -> Int[np.ndarray, " length"]:
        """Its context: the prompt and the response so far."""
        if self.anew is not None:
            return self.tokens[self.anew : self.drawn]
        if not self.drawn:
            return self.prompt.tokens
        return np.concatenate([self.prompt.tokens, self.tokens[: self.drawn]])

    def append(self, tokens: Int[np.ndarray, " new"], logprobs: Float[np.ndarray, " new"]) -> None:
        """Takes new tokens."""
        place = slice(self.drawn, self.drawn + len(tokens))
        if place.stop > len(self.tokens):  # buffers grow with the response: most requests only wait
            room = max(place.stop, 2 * len(self.tokens), min(self.limit, _FIRST_TOKENS))
            old, self.tokens = self.tokens, np.empty(room, np.int32)
            self.tokens[: self.drawn] = old[: self.drawn]
            old, self.logprobs = self.logprobs, np.empty(room, np.float32)
            self.logprobs[: self.drawn] = old[: self.drawn]
        if len(tokens) and (not self.spans or self.spans[-1].version != self.version):
            self.spans = (*self.spans, Span(self.drawn, self.version))
        self.tokens[place], self.logprobs[place] = tokens, logprobs
        self.drawn = place.stop

    def end_turn(self, reason: FinishReason) -> DrawnTurn:
        """Ends the present turn of an episode, and returns it."""
        self.turns = (*self.turns, TurnSpan(self.begun, self.drawn))
        self.reasons = (*self.reasons, reason)
        return self.drawn_turns[-1]

    @property
    def drawn_turns(self) -> list[DrawnTurn]:
        """The turns of an episode that have ended, as its environment gets them."""
        return [
            DrawnTurn(
                tokens=self.tokens[first:stop].copy(),
                logprobs=self.logprobs[first:stop].copy(),
                finish_reason=reason,
            )
            for (first, stop), reason in zip(self.turns, self.reasons, strict=True)
        ]

    def take_answer(self, before: Continuation | None, limits: EpisodeLimits) -> None:
        """Takes an environment's answer: the next turn begins after `before`, or the episode ends (`finish_reason`)."""
        self.due, self.finish_reason = None, limits.end(self, before)
        if self.finish_reason is not None:
            return
        assert before is not None
        if before.anew:
            self.contexts = (*self.contexts, ContextSpan(self.drawn, self.drawn + len(before.tokens)))
        last = self.drawn - 1
        self.append(before.tokens, np.zeros(len(before.tokens), np.float32))
        # The last sampled token is in the pages only if other responses had to continue.
        self.fed = self.tokens[last : self.drawn].copy() if self.turns and not before.anew else NOTHING
        self.begun = self.drawn
        self.limit = self.target = limits.turn_end(self)
        self.prefix = None

    def response(self, version: int = 0) -> Response:
        """Returns the response, which has ended. Without a token, it counts as sampled by the weights of `version`."""
        assert self.finish_reason is not None
        return Response(
            tokens=self.tokens[: self.drawn].copy(),
            logprobs=self.logprobs[: self.drawn].copy(),
            finish_reason=self.finish_reason,
            spans=self.spans or (Span(0, version),),
            turns=self.turns,
            contexts=self.contexts,
        )

    def rest(self) -> "Request":
        """Returns a copy outside every sampler: without a slot, pages or a prefix."""
        return replace(
            self,
            tokens=self.tokens[: self.drawn].copy(),
            logprobs=self.logprobs[: self.drawn].copy(),
            prefix=None,
            order=-1,
            row=None,
            fed=NOTHING,
        )


class Reading:
    """Prefills sequences, some at a time: prompts, each for all its responses, and contexts of responses that continue."""

    def __init__(self, engine: Engine, params: PyTree) -> None:
        self._engine, self._params = engine, params
        self._work: Iterator[list[tuple[int, PyTree, int]]] = iter(())
        self._requests: Sequence[Sequence[Request]] = ()
        self._unread: set[int] = set()

    @property
    def busy(self) -> bool:
        """True until all sequences that were begun are prefilled."""
        return bool(self._unread)

    @property
    def unread(self) -> list[Sequence[Request]]:
        """The requests of each sequence that was begun and is not prefilled yet."""
        return [self._requests[index] for index in sorted(self._unread)]

    def begin(self, requests: Sequence[Sequence[Request]]) -> None:
        """Begins sequences, each with the requests that begin with it."""
        self._requests, self._unread = requests, set(range(len(requests)))
        self._work = self._engine.prefill(self._params, [same[0].sequence for same in requests])

    def advance(self) -> list[Request]:
        """Does one part of the work. Returns the requests that can now start."""
        new: list[Request] = []
        for index, prefix, place in next(self._work):
            self._unread.remove(index)
            for request in self._requests[index]:
                request.prefix, request.place, request.fed = prefix, place, NOTHING
                new.append(request)
        if not self._unread:
            self._work, self._requests = iter(()), ()  # they hold prefixes on the device
        return new
