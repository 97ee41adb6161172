"""Responses to requests that come at any time, through an engine whose slots are kept full: the loop of sampling in a thread of its own.

The thread is the only one that sends programs to the devices. Others hand it requests, take them back, and bring new weights; it does so between two
calls of the engine.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import FinishReason, Prompt, Span
from dapo_jax.sampling.decode_loop import DecodeLoop
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.requests import OwnOptions, Request, StopRule

_REFILL_FRAC = 0.125
"""Slots are refilled once this share of those that were live is free."""


class QueueFullError(Exception):
    """There are as many responses under way and waiting as the server takes."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """New tokens of a response."""

    index: int
    """Which of its request's responses it is."""
    tokens: Int[np.ndarray, " new"]
    logprobs: Float[np.ndarray, " new"]
    """In nats, at the sampling temperature, under the weights that drew each token."""
    spans: tuple[Span, ...]
    """The weights that drew all tokens so far."""
    finish_reason: FinishReason | None
    """None: the response goes on."""


Listener = Callable[[Progress | BaseException], None]
"""Told of what a request's responses have come to, or why they cannot go on. Called in the loop's thread; must not wait."""


@dataclass(eq=False)
class Served:
    """The responses to one request."""

    requests: list[Request]
    listener: Listener
    streams: bool
    """The listener is told after every call of the engine, not only of the ends."""


@dataclass(eq=False)
class _Growing:
    """One response on its way."""

    served: Served
    request: Request
    sent: int = 0
    noted: int = 0
    spans: list[Span] = field(default_factory=list)

    def note(self, length: int, version: int) -> None:
        """Notes that all tokens up to `length` which are new were drawn by the weights `version`."""
        if length > self.noted and (not self.spans or self.spans[-1].version != version):
            self.spans.append(Span(self.noted, version))
        self.noted = max(length, self.noted)

    def tell(self, length: int, reason: FinishReason | None) -> None:
        """Tells the listener of the tokens up to `length` that it does not know."""
        new = slice(self.sent, length)
        self.sent = length
        request = self.request
        self.served.listener(
            Progress(
                index=request.index,
                tokens=request.tokens[new].copy(),
                logprobs=request.logprobs[new].copy(),
                spans=tuple(self.spans),
                finish_reason=reason,
            )
        )


class RequestLoop:
    """Serves requests from `start` to `stop`; a context manager.

    Args:
        engine: prefills and decodes.
        weights: for it.
        key: draws for requests without a seed, together with the order in which they come.
        version: of the weights.
        most_responses: under way and waiting; more are refused.
    """

    def __init__(
        self, engine: Engine, weights: PyTree, *, key: PRNGKeyArray, version: int, most_responses: int
    ) -> None:
        self._engine, self._most = engine, most_responses
        self.version = version
        """The version of the weights that draw now."""
        self.failure: BaseException | None = None
        """The error that ended the thread."""
        self.ended = threading.Event()
        """Set once the thread has ended."""
        self._ordinals = itertools.count()
        self._changed = threading.Condition()
        self._new: deque[Served] = deque()
        self._dropped: list[Request] = []
        self._weights: deque[tuple[Callable[[], PyTree], int, Future[None]]] = deque()
        self._stopping = False
        self._under_way = 0
        self._growing: dict[int, _Growing] = {}
        self._loop = DecodeLoop(
            engine,
            weights,
            key=key,
            decoding=decoding(),
            stop=None,
            refill_frac=_REFILL_FRAC,
            on_look=lambda: None,
            more=self._more,
            prefill_first=False,
        )
        self._thread = threading.Thread(target=self._run, name="request loop")

    @property
    def under_way(self) -> int:
        """Responses under way and waiting."""
        return self._under_way

    def submit(
        self, prompt: Int[np.ndarray, " prompt"], options: OwnOptions, *, count: int, max_tokens: int, listener: Listener,
        streams: bool = False,
    ) -> Served:  # fmt: skip
        """Asks for `count` responses of up to `max_tokens` tokens. Returns at once; may be called from any thread.

        Raises:
            QueueFullError: there is no room for them.
            RuntimeError: the loop has ended, or is ending.
        """
        with self._changed:
            if self._stopping or self.failure is not None:
                raise RuntimeError("the server is stopping")
            if self._under_way + count > self._most:
                raise QueueFullError(
                    f"{self._under_way} responses are under way and waiting, and {count} more are asked for; the server takes {self._most}"
                )
            asked = Prompt(ordinal=next(self._ordinals), tokens=prompt, text="", answer="")
            requests = [Request(asked, index, max_tokens, options=options) for index in range(count)]
            served = Served(requests, listener, streams)
            self._under_way += count
            self._new.append(served)
            self._changed.notify()
        return served

    def cancel(self, served: Served) -> None:
        """Ends what is left of a request's responses, and tells nobody; may be called from any thread, also when all have ended."""
        with self._changed:
            self._dropped += served.requests
            self._changed.notify()

    def take(self, weights: Callable[[], PyTree], version: int) -> None:
        """Serves other weights from the next call of the engine on, and returns when it does. Responses under way go on with these.

        `weights` is called in the loop's thread, since only one thread may send programs to the devices.

        Raises:
            Exception: that of `weights`; those of before go on being served.
            RuntimeError: the loop has ended.
        """
        taken: Future[None] = Future()
        with self._changed:
            if self._stopping or self.failure is not None:
                raise RuntimeError("the server is stopping")
            self._weights.append((weights, version, taken))
            self._changed.notify()
        taken.result()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; responses that are under way are not finished."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> "RequestLoop":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The thread.

    def _run(self) -> None:
        error: BaseException = RuntimeError("the server has stopped")
        try:
            while self._wait():
                self._drop()
                self._take()
                self._tell(self._loop.step() or [])
        except BaseException as failure:  # whatever it is, those that wait have to hear of it
            self.failure = error = failure
        with self._changed:
            self._stopping = True
            left = [*self._new, *dict.fromkeys(each.served for each in self._growing.values())]
            for *_, taken in self._weights:
                taken.set_exception(RuntimeError(str(error)))
        for served in left:
            with suppress(Exception):
                served.listener(error)
        self.ended.set()

    def _wait(self) -> bool:
        """Waits until there is something to do; False: it is to stop."""
        with self._changed:
            while not (self._stopping or self._new or self._growing or self._dropped or self._weights):
                self._changed.wait()
            return not self._stopping

    def _drop(self) -> None:
        with self._changed:
            dropped, self._dropped = self._dropped, []
            gone = {id(request) for request in dropped}
            unread = [served for served in self._new if id(served.requests[0]) in gone]
            for served in unread:
                self._new.remove(served)
            left = [request for request in dropped if self._growing.pop(id(request), None) is not None]
            self._under_way -= len(left) + sum(len(served.requests) for served in unread)
        if left:
            self._loop.drop(left)

    def _take(self) -> None:
        with self._changed:
            waiting, self._weights = self._weights, deque()
        for weights, version, taken in waiting:
            try:
                made = jax.block_until_ready(weights())
            except Exception as error:
                taken.set_exception(error)
                continue
            try:
                self._loop.take(made)
            except BaseException as error:  # nothing goes on after that
                for *_, each in waiting:
                    if not each.done():
                        each.set_exception(error)
                raise
            self.version = version
            taken.set_result(None)

    def _more(self) -> list[Sequence[Request]]:
        """The requests that are read next: no more than may start at once."""
        taken: list[Sequence[Request]] = []
        with self._changed:
            while self._new and len(taken) < self._engine.slots:
                served = self._new.popleft()
                self._growing.update((id(each), _Growing(served, each)) for each in served.requests)
                taken.append(served.requests)
        return taken

    def _tell(self, ended: Sequence[tuple[Request, int, FinishReason]]) -> None:
        over = {id(request): (length, reason) for request, length, reason in ended}
        for name, growing in list(self._growing.items()):
            length, reason = over.get(name, (growing.request.drawn, None))
            growing.note(length, self.version)
            if reason is not None:
                del self._growing[name]
                with self._changed:
                    self._under_way -= 1
            if reason is not None or (growing.served.streams and length > growing.sent):
                growing.tell(length, reason)


def seeded_key(seed: int) -> PRNGKeyArray:
    """The key of a request with a seed of up to 64 bits, whatever the server's own is."""
    high, low = divmod(seed & ((1 << 64) - 1), 1 << 32)
    return _folded(np.uint32(high), np.uint32(low))


@jax.jit
def _folded(high: jax.Array, low: jax.Array) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), high), low)


def stop_rule(strings: StopRule | None, ids: Sequence[int]) -> StopRule | None:
    """Ends a response at the first token that completes a stop string or is one of `ids`."""
    if not ids:
        return strings
    return partial(_first_stop, strings, np.array(ids, np.int32))


def _first_stop(
    strings: StopRule | None, ids: Int[np.ndarray, " ids"], tokens: Int[np.ndarray, " tokens"], seen: int
) -> int | None:
    ends = [seen + int(place) + 1 for place in np.flatnonzero(np.isin(tokens[seen:], ids))[:1]]
    if strings is not None and (found := strings(tokens, seen)) is not None:
        ends.append(found)
    return min(ends, default=None)
