"""A response on its way through the sampler, and the reading of what it begins with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from dapo_jax.dapo.episode_limits import EpisodeLimits
from dapo_jax.dapo.rollouts import Continuation, Prompt
from dapo_jax.sampling.decoding import DecodingOptions
from dapo_jax.sampling.interface import Engine

NOTHING = np.zeros(0, np.int32)
"""No tokens."""

StopRule = Callable[[np.ndarray, int], int | None]
"""(a response's tokens so far, how many of them it has seen before) -> at how many tokens the response ends, or None."""


@dataclass(frozen=True, kw_only=True)
class OwnOptions:
    """The options of one request, where requests differ."""

    decoding: DecodingOptions
    key: PRNGKeyArray | None = None
    """Draws the response in place of the loop's key and the prompt's ordinal; None: they do."""
    stop: StopRule | None = None


@dataclass(eq=False)
class Request:
    """One response on its way: waiting for a slot, then growing in it, perhaps waiting again."""

    prompt: Prompt
    index: int
    limit: int
    """Tokens at which it ends."""
    target: int = 0
    """Tokens at which it pauses; by default it goes on to the limit."""
    most: int = 0
    """Tokens that it may come to in all its turns; by default the limit."""
    prefix: PyTree = None
    """The prefix that waits to be inserted; None: nothing was read, or it was inserted."""
    place: int = 0
    """Which of the prefix's prompts is its own."""
    drawn: int = 0
    turn: int = 0
    """The present turn of an episode, from 0."""
    begun: int = 0
    """Tokens before the present turn."""
    anew: int | None = None
    """The token with which its present context begins; None: that begins with the prompt."""
    order: int = -1
    """The order in which responses started; -1: not yet."""
    row: int | None = None
    """Its row of the table of pages, as long as it holds pages."""
    fed: Int[np.ndarray, " fed"] = field(default_factory=lambda: NOTHING)
    """Tokens that are not in its pages, and that it takes before it draws."""
    options: OwnOptions | None = None
    """None: those of the loop."""
    dropped: bool = False
    """Nobody waits for it any more."""
    tokens: Int[np.ndarray, " limit"] = field(init=False)
    logprobs: Float[np.ndarray, " limit"] = field(init=False)

    def __post_init__(self) -> None:
        self.target, self.most = self.target or self.limit, self.most or self.limit
        self.tokens, self.logprobs = np.empty(0, np.int32), np.empty(0, np.float32)

    @property
    def ahead(self) -> int:
        """The number to be added to one of the response's tokens for its place in the context: the prompt is ahead of it, or what was before the present context is not there."""
        return len(self.prompt.tokens) if self.anew is None else -self.anew

    @property
    def length(self) -> int:
        """Tokens of its context: of the prompt and of the response so far."""
        return self.ahead + self.drawn

    @property
    def paused(self) -> bool:
        """True if it has drawn as many tokens as it may for now."""
        return self.drawn >= self.target

    def room(self, steps: int) -> int:
        """Tokens that it may come to in a call that draws `steps`."""
        return self.ahead + min(self.drawn + steps, self.target)

    @property
    def sequence(self) -> Int[np.ndarray, " length"]:
        """Its context: the prompt and what was drawn."""
        if self.anew is not None:
            return self.tokens[self.anew : self.drawn]
        if not self.drawn:
            return self.prompt.tokens
        return np.concatenate([self.prompt.tokens, self.tokens[: self.drawn]])

    def append(self, tokens: Int[np.ndarray, " new"], logprobs: Float[np.ndarray, " new"]) -> None:
        """Takes new tokens."""
        if not len(self.tokens):  # room is made when the first are there, not for all that wait
            self.tokens, self.logprobs = np.empty(self.most, np.int32), np.empty(self.most, np.float32)
        place = slice(self.drawn, self.drawn + len(tokens))
        self.tokens[place], self.logprobs[place] = tokens, logprobs
        self.drawn = place.stop

    def begin_turn(self, turn: int, before: Continuation, limits: EpisodeLimits) -> None:
        """Begins a turn behind what an environment puts before it."""
        if before.anew:
            self.anew = self.drawn
        last = self.drawn - 1
        self.append(before.tokens, np.zeros(len(before.tokens), np.float32))
        # The last token that was drawn is in the pages only if others had to go on.
        self.fed = self.tokens[last : self.drawn].copy() if turn and not before.anew else NOTHING
        self.turn, self.begun = turn, self.drawn
        self.limit = self.target = limits.turn_end(self.begun, ahead=self.ahead)
        self.prefix = None


class Reading:
    """Reads sequences, some at a time: prompts, each for the responses to it, or what was drawn before too."""

    def __init__(self, engine: Engine, params: PyTree) -> None:
        self._engine, self._params = engine, params
        self._work: Iterator[list[tuple[int, PyTree, int]]] = iter(())
        self._requests: Sequence[Sequence[Request]] = ()
        self._left = 0
        self._unread: set[int] = set()

    @property
    def busy(self) -> bool:
        """True while something that was begun is not read to its end."""
        return self._left > 0

    @property
    def unread(self) -> list[Sequence[Request]]:
        """The sequences that were begun and not read to their ends, each with its requests."""
        return [self._requests[index] for index in sorted(self._unread)]

    def begin(self, requests: Sequence[Sequence[Request]]) -> None:
        """Sequences, each with the requests that begin with it."""
        self._requests, self._left, self._unread = requests, len(requests), set(range(len(requests)))
        self._work = self._engine.prefill(self._params, [same[0].sequence for same in requests])

    def go_on(self) -> list[Request]:
        """One part of the work. Returned are the responses that can now start."""
        new: list[Request] = []
        for index, prefix, place in next(self._work):
            self._left -= 1
            self._unread.remove(index)
            for request in self._requests[index]:
                request.prefix, request.place, request.fed = prefix, place, NOTHING
                new.append(request)
        if not self._left:
            self._work, self._requests = iter(()), ()  # or they would hold what was read
        return new
