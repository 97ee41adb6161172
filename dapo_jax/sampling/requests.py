"""The state of a response in the sampler, and the prefill of its context."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int, PRNGKeyArray, PyTree

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
from dapo_jax.dapo.tokens import Tokens, join, values_of
from dapo_jax.sampling.decoding import DecodingOptions
from dapo_jax.sampling.interface import Engine

NOTHING = np.zeros(0, np.int32)
"""An empty token array."""

StopRule = Callable[[np.ndarray, int], int | None]
"""Function that takes a response's tokens and their number before the last engine call. Returns the length at which the response ends, or None."""


@dataclass(frozen=True, kw_only=True)
class OwnOptions:
    """The options of one request in a loop whose requests have different options."""

    decoding: DecodingOptions
    key: PRNGKeyArray | None = None
    """Random key of the response. If None, the key is derived from the loop's key and the prompt's ordinal."""
    stop: StopRule | None = None


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits on the turns and tokens of an episode. A turn needs room for the environment's tokens and for at least one sampled token."""

    max_turns: int
    turn_tokens: int
    """Maximum number of tokens in a turn. 0 means that only the episode's limit applies."""
    episode_tokens: int
    """Maximum number of tokens in an episode, including tokens from the environment."""
    capacity: int
    """Maximum number of tokens in a context."""

    def end(self, request: "Request", before: Continuation | None) -> FinishReason | None:
        """Returns the finish reason of an episode that is over, or None if its next turn begins after the tokens `before`.

        If the environment ends an episode whose last turn was cut off by the token limit, the reason is "length", as for a response without an environment.
        An episode without room for a first turn ends at once. None for `before`: the environment ended the episode, or the episode was lost.
        """
        if before is None:
            cut = request.drawn >= self.episode_tokens and request.reasons[-1:] == ("length",)
            return "length" if cut else "stop"
        context = len(before.tokens) + (0 if before.new_context else request.length)
        if len(before.tokens) < self.episode_tokens - request.drawn and context < self.capacity:
            return None if len(request.turns) < self.max_turns else "length"
        return "length" if request.turns else "stop"

    def turn_end(self, request: "Request") -> int:
        """Returns the number of episode tokens at which the current turn must end."""
        most = min(filter(None, (self.turn_tokens, request.standing.turn_limit)), default=self.episode_tokens)
        return min(self.episode_tokens, request.begun + most, self.capacity - request.ahead)


@dataclass(eq=False)
class Request:
    """One response, from its request to its end: in the queue, in a slot, between two turns or rounds, or in a checkpoint.

    A response that interacts with an environment is an episode of several turns. `rest` returns a copy without the sampler's state.
    """

    prompt: Prompt
    index: int
    limit: int
    """Number of response tokens at which the response, or the current turn of an episode, must end."""
    target: int = 0
    """Number of response tokens at which the response pauses. Defaults to `limit`."""
    version: int = 0
    """Version of the weights that now sample the response, which is the number of completed training steps."""
    begun: int = 0
    """Number of response tokens before the current turn."""
    spans: tuple[Span, ...] = ()
    """Versions of the weights that sampled the response's tokens; empty if there are no tokens."""
    turns: tuple[TurnSpan, ...] = ()
    """Turns of an episode that have ended."""
    reasons: tuple[FinishReason, ...] = ()
    """Finish reason of each turn in `turns`."""
    contexts: tuple[ContextSpan, ...] = ()
    """Contexts that the environment supplied. Each context replaced the prompt and all earlier tokens."""
    due: int | None = None
    """For an episode in flight, the round after which the environment's answer is applied. None while a turn is being sampled, or once the episode is over."""
    standing: Standing = field(default_factory=Standing)
    """The environment's rewards and metrics so far, for an episode in flight, and its limit of the current turn."""
    finish_reason: FinishReason | None = None
    """None until the response, or the whole episode, has ended."""
    record: Tokens = field(default_factory=Tokens)
    """The tokens of the response so far, including tokens from the environment."""
    prompt_values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """See `Response.prompt_values`."""
    prefix: PyTree = None
    """The prefilled context to insert into a slot. None before the context is prefilled and after it is inserted."""
    place: int = 0
    """Index of the request's context in `prefix`."""
    order: int = -1
    """Position in the order in which responses started; -1 if the response has not started."""
    row: int | None = None
    """The request's row in the page table, or None if it has no pages."""
    fed: Int[np.ndarray, " fed"] = field(default_factory=lambda: NOTHING)
    """Context tokens that the request's pages do not contain. They are fed before it samples."""
    options: OwnOptions | None = None
    """The request's own options, or None if it uses the loop's options."""
    dropped: bool = False
    """Whether the caller has abandoned the request."""

    def __post_init__(self) -> None:
        self.target = self.target or self.limit

    @property
    def drawn(self) -> int:
        """Number of tokens in the response so far, including tokens from the environment."""
        return len(self.record)

    @property
    def context_start(self) -> int | None:
        """Index of the token with which the current context begins, or None if the context begins with the prompt."""
        return self.contexts[-1].first if self.contexts else None

    @property
    def ahead(self) -> int:
        """Offset from a token's index in the response to its index in the context."""
        return len(self.prompt.tokens) if self.context_start is None else -self.context_start

    @property
    def length(self) -> int:
        """Number of tokens in the request's context (see `context`)."""
        return self.ahead + self.drawn

    @property
    def paused(self) -> bool:
        """Whether the response has reached `target` and therefore does not sample for now."""
        return self.drawn >= self.target

    @property
    def waits(self) -> bool:
        """Whether the request is an episode in flight whose environment is working, so it does not sample."""
        return self.due is not None

    def room(self, steps: int) -> int:
        """Maximum number of tokens in the request's context after a call that samples `steps` tokens."""
        return self.ahead + min(self.drawn + steps, self.target)

    @property
    def context(self) -> Tokens:
        """The tokens of the request's context: the prompt and the response so far or, if an environment replaced them, all tokens since then."""
        if self.context_start is not None:
            return self.record.cut(self.context_start)
        prompt = Tokens(self.prompt.tokens, **self.prompt_values)
        return join([prompt, self.record]) if self.drawn else prompt

    def append(self, new: Tokens) -> None:
        """Appends tokens to the response."""
        if len(new) and (not self.spans or self.spans[-1].version != self.version):
            self.spans = (*self.spans, Span(self.drawn, self.version))
        self.record.append(new)

    def fill(self, first: int, values: Mapping[str, np.ndarray]) -> None:
        """Records values that the model computed for the tokens of the context from index `first` on (see `Tokens.fill`)."""
        if (skipped := self.ahead - first) > 0:
            self.prompt_values = self.prompt_values or {n: array[:skipped] for n, array in values.items()}
            values, first = {name: array[skipped:] for name, array in values.items()}, self.ahead
        self.record.fill(first - self.ahead, values)

    def end_turn(self, reason: FinishReason) -> None:
        """Ends the current turn of an episode."""
        self.turns = (*self.turns, TurnSpan(self.begun, self.drawn))
        self.reasons = (*self.reasons, reason)

    @property
    def drawn_turns(self) -> list[DrawnTurn]:
        """The turns of an episode that have ended, in the form that its environment receives."""
        turns, end = list[DrawnTurn](), 0
        for (first, stop), reason in zip(self.turns, self.reasons, strict=True):
            before = Continuation(self.record.ids[end:first].copy(), (end, first) in self.contexts)
            record = self.record.cut(first, stop).sampled.copy()
            turns.append(DrawnTurn(record=record, finish_reason=reason, before=before))
            end = stop
        return turns

    def take_answer(self, before: Continuation | None, limits: EpisodeLimits) -> None:
        """Applies an environment's answer: the next turn begins after the tokens `before`, or the episode ends and gets a `finish_reason`."""
        self.due, self.finish_reason = None, limits.end(self, before)
        if self.finish_reason is not None:
            return
        assert before is not None
        if before.new_context:
            self.contexts = (*self.contexts, ContextSpan(self.drawn, self.drawn + len(before.tokens)))
        last = self.drawn - 1
        self.append(Tokens(before.tokens))
        # The last sampled token is fed too: if no other response was running, its forward pass was skipped.
        self.fed = self.record.ids[last:].copy() if self.turns and not before.new_context else NOTHING
        self.begun, self.standing.turn_limit = self.drawn, before.limit
        self.limit = self.target = limits.turn_end(self)
        self.prefix = None

    def response(self, version: int = 0) -> Response:
        """Returns the response, which must have ended. If it has no tokens, it is recorded as sampled by the weights of `version`."""
        assert self.finish_reason is not None
        return Response(
            record=self.record.copy(),
            prompt_values=self.prompt_values,
            finish_reason=self.finish_reason,
            spans=self.spans or (Span(0, version),),
            turns=self.turns,
            contexts=self.contexts,
        )

    def rest(self) -> "Request":
        """Returns a copy that is independent of any sampler: without a slot, pages or a prefix."""
        return replace(self, record=self.record.copy(), prefix=None, order=-1, row=None, fed=NOTHING)


def by_context(requests: Sequence[Request]) -> list[list[Request]]:
    """Groups the requests of each prompt that have the same context, so that one prefill serves them."""
    groups: dict[tuple[int, bytes], list[Request]] = {}
    for request in requests:
        context = request.context
        known = b"".join(array.tobytes() for array in (context.ids, *context.processed.values()))
        groups.setdefault((request.prompt.ordinal, known), []).append(request)
    return list(groups.values())


class Reading:
    """Prefills sequences, one engine call at a time. A sequence is a prompt, shared by its responses, or the context of a response that continues."""

    def __init__(self, engine: Engine, params: PyTree) -> None:
        self._engine, self._params = engine, params
        self._work: Iterator[list[tuple[int, PyTree, int]]] = iter(())
        self._unread: dict[int, Sequence[Request]] = {}

    @property
    def busy(self) -> bool:
        """Whether any sequence has not been prefilled yet."""
        return bool(self._unread)

    @property
    def unread(self) -> list[Sequence[Request]]:
        """The requests of each sequence that has not been prefilled yet."""
        return list(self._unread.values())

    def begin(self, requests: Sequence[Sequence[Request]]) -> None:
        """Starts to prefill sequences, each shared by a list of requests."""
        self._unread = dict(enumerate(requests))
        contexts = [same[0].context for same in requests]
        routes = [context.routes for context in contexts]
        known = (routes,) if any(record is not None for record in routes) else ()
        self._work = self._engine.prefill(self._params, [context.ids for context in contexts], *known)

    def advance(self) -> list[Request]:
        """Runs one prefill call. Returns the requests that can start now."""
        new: list[Request] = []
        for index, prefix, position in next(self._work):
            values = values_of(prefix, processed=True)
            for request in self._unread.pop(index):
                request.prefix, request.place, request.fed = prefix, position, NOTHING
                request.fill(0, {name: of_prompts[position] for name, of_prompts in values.items()})
                new.append(request)
        if not self._unread:
            self._work = iter(())  # frees prefixes on the device
        return new
