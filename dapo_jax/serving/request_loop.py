"""The decode loop for both the HTTP server and the JetStream server. It runs in its own thread and batches incoming requests continuously.

Only this thread launches programs on the devices. Other threads can submit requests, cancel requests, and supply new weights. The loop responds
to them between engine calls.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray, PyTree

from dapo_jax.dapo.rollouts import FinishReason, Prompt, Span
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.sampling.decode_loop import DecodeLoop
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.interface import Engine
from dapo_jax.sampling.prefill import PromptScores
from dapo_jax.sampling.requests import OwnOptions, Request
from dapo_jax.text.http import RequestError

_REFILL_FRAC = 0.125
"""Slots are refilled once this fraction of the active slots has become free."""


def stopping() -> RequestError:
    """Returns the error for requests to a server that is stopping."""
    return RequestError("the server is stopping", status=503, code="stopping")


@dataclass(frozen=True)
class NewTokens:
    """New tokens of one response."""

    index: int
    """Index of the response within its request."""
    record: Tokens
    spans: tuple[Span, ...]
    """The response so far, split into spans of tokens that were sampled with the same version of the weights."""
    finish_reason: FinishReason | None
    """Why the response ended, or None if it continues."""
    scores: PromptScores | None = None
    """The prompt's scores, if the request asked for them. `record` then begins with the prompt, whose first token has the log-probability 0."""


Listener = Callable[[NewTokens | BaseException], None]
"""Callback that receives new tokens, or the error that stopped the loop. It is called in the loop's thread, so it must not block."""


@dataclass(eq=False)
class ServedRequest:
    """One request and the state of its responses."""

    requests: list[Request]
    listener: Listener
    streams: bool
    """If True, new tokens are sent to the listener after every engine call instead of only at the end of a response."""
    sent: list[int]
    """Number of tokens of each response that the listener has received."""


class RequestLoop:
    """Samples responses to requests in a separate thread, which runs while this context manager is open.

    `weights` are the initial weights in the engine's format, and `version` is their version. Requests without a seed use `key`; their tokens also depend on the
    order in which requests arrive. At most `most_responses` responses may run or wait.
    """

    def __init__(
        self, engine: Engine, weights: PyTree, *, key: PRNGKeyArray, version: int, most_responses: int
    ) -> None:
        self._engine, self._weights, self._most = engine, weights, most_responses
        self.version = version
        """Version of the weights in use."""
        self.failure: BaseException | None = None
        """The error that stopped the thread, if any."""
        self.ended = threading.Event()
        """Set once the thread has ended."""
        self._ordinals = itertools.count()
        self._changed = threading.Condition()
        self._new: deque[ServedRequest] = deque()
        self._unscored: deque[ServedRequest] = deque()
        self._actions: deque[Callable[[], None]] = deque()
        """Functions that other threads have queued for the loop's thread to call."""
        self._stopping = False
        self._running: dict[Request, ServedRequest] = {}
        self._loop = DecodeLoop(
            engine, weights, key=key, decoding=decoding(), stop=None, refill_frac=_REFILL_FRAC, on_look=lambda: None,
            more=self._more, prefill_first=False,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="request loop")

    @property
    def under_way(self) -> int:
        """Number of running and waiting responses."""
        with self._changed:
            return sum(len(served.requests) for served in [*self._new, *self._unscored]) + len(self._running)

    def load(self) -> dict[str, float | int]:
        """Returns the current load under the names of Prometheus' metrics (`http_server`). Any thread may call this."""
        slots, under_way = self._loop.slots, self.under_way
        sizes, running = slots.pages.sizes, min(slots.live, under_way)
        free = sum(slots.pages.free(pool) for pool in range(sizes.pools)) / (sizes.pools * sizes.pool_pages)
        load = {"weights_version": self.version, "responses_running": running}
        return {**load, "responses_waiting": under_way - running, "cache_used_ratio": 1 - free}

    def submit(
        self, prompt: Int[np.ndarray, " prompt"], options: OwnOptions, *, count: int, max_tokens: int, listener: Listener,
        streams: bool = False, scores: bool = False,
    ) -> ServedRequest:  # fmt: skip
        """Queues a request for `count` responses of up to `max_tokens` tokens, and returns immediately. May be called from any thread.

        With `scores`, the prompt is scored. The response is then the prompt, and with `max_tokens=1` also the most likely next token. Raises RequestError if
        too many responses are running or waiting, or the loop is stopping.
        """
        with self._changed:
            if self._stopping:
                raise stopping()
            if (under_way := self.under_way) + count > self._most:
                raise RequestError(
                    f"{under_way} responses are running or waiting, and this request needs {count} more; the server accepts {self._most}: "
                    "try again later, or serve with a larger --queue",
                    status=503, code="queue_full",
                )  # fmt: skip
            asked = Prompt(ordinal=next(self._ordinals), tokens=prompt, text="", answer="")
            requests = [Request(asked, index, max_tokens, options=options) for index in range(count)]
            served = ServedRequest(requests, listener, streams, [0] * count)
            (self._unscored if scores else self._new).append(served)
            self._changed.notify()
        return served

    def cancel(self, served: ServedRequest) -> None:
        """Cancels the unfinished responses of a request without calling its listener. Any thread may call this, even after the request has ended."""
        with self._changed:
            self._actions.append(partial(self._drop, served))
            self._changed.notify()

    def take(self, weights: Callable[[], PyTree], version: int) -> None:
        """Switches to the weights that `weights` returns, starting with the next engine call. Returns once the switch is complete.

        Running responses are re-prefilled and continue with the new weights. `weights` is called in the loop's thread, because only this
        thread may launch programs on the devices.

        Raises:
            Exception: any error that `weights` raises. The old weights stay in use.
            RequestError: the loop has ended.
        """
        taken: Future[None] = Future()
        with self._changed:
            if self._stopping:
                raise stopping()
            self._actions.append(partial(self._take, weights, version, taken))
            self._changed.notify()
        taken.result()

    def __enter__(self) -> "RequestLoop":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread and aborts running responses."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        error: BaseException = RuntimeError("the server has stopped")
        try:
            while self._wait():
                self._score()
                self._send(self._loop.step() or [])
        except BaseException as failure:  # listeners are notified of every kind of error
            self.failure = error = failure
        with self._changed:
            self._stopping = True
            left = dict.fromkeys([*self._new, *self._unscored, *self._running.values()])
        self._act()  # pending calls to `take` raise an error, because the loop is stopping
        for served in left:
            with suppress(Exception):
                served.listener(error)
        self.ended.set()

    def _wait(self) -> bool:
        """Waits for work, and calls the functions that other threads have queued. Returns False if the loop should stop."""
        with self._changed:
            while not (self._stopping or self._new or self._unscored or self._running or self._actions):
                self._changed.wait()
        self._act()
        return not self._stopping

    def _act(self) -> None:
        while self._actions:
            self._actions.popleft()()

    def _drop(self, served: ServedRequest) -> None:
        with self._changed:
            for waiting in (self._new, self._unscored):
                if served in waiting:
                    waiting.remove(served)
            left = [request for request in served.requests if self._running.pop(request, None) is not None]
        if left and not self._stopping:
            self._loop.drop(left)

    def _take(self, weights: Callable[[], PyTree], version: int, taken: Future[None]) -> None:
        try:
            if self._stopping:
                raise stopping()
            ready = jax.block_until_ready(weights())
        except Exception as error:
            taken.set_exception(error)
            return
        try:
            self._loop.take(ready)
            self._weights = ready
            self.version = version
            for request in self._running:
                request.version = version
        finally:
            taken.set_result(None)

    def _score(self) -> None:
        """Scores the prompts of the next requests, at most one per slot, so that running responses need not wait for all of them."""
        with self._changed:
            taken = list(islice(self._unscored, self._engine.slots))
        prompts = [served.requests[0].prompt.tokens for served in taken]
        prefill: Any = self._engine.prefill  # scores are not part of the interface `Engine`
        for finished in prefill(self._weights, prompts, score=True) if taken else ():
            for index, prefix, row in finished:
                taken[index].listener(self._scored(taken[index].requests[0], prefix.scores[row]))
                with self._changed:
                    self._unscored.remove(taken[index])

    def _scored(self, request: Request, scores: PromptScores) -> NewTokens:
        """Returns the prompt's tokens, and with a limit of 1 also the most likely next token."""
        tokens = np.append(request.prompt.tokens, scores.top[-1:])
        logprobs = np.concatenate([[0.0], scores.logprobs[:-1], scores.top_logprobs[-1:]], dtype=np.float32)
        kept, stops = slice(len(request.prompt.tokens) + request.limit), tokens[-1] in self._engine.stop_ids
        reason, spans = "stop" if request.limit and stops else "length", (Span(0, self.version),)
        return NewTokens(0, Tokens(tokens[kept], logprobs=logprobs[kept]), spans, reason, scores)

    def _more(self) -> list[Sequence[Request]]:
        """Removes up to `engine.slots` requests from the queue, and returns them to be prefilled next."""
        taken: list[Sequence[Request]] = []
        with self._changed:
            while self._new and len(taken) < self._engine.slots:
                served = self._new.popleft()
                for request in served.requests:
                    request.version = self.version
                    self._running[request] = served
                taken.append(served.requests)
        return taken

    def _send(self, ended: Sequence[tuple[Request, FinishReason]]) -> None:
        """For each response that has ended or is streamed, passes the new tokens to its listener."""
        over = dict(ended)
        for request, served in list(self._running.items()):
            reason, new = over.get(request), request.record.cut(served.sent[request.index])
            if reason is not None:
                del self._running[request]
            elif not (served.streams and len(new)):
                continue
            served.sent[request.index] = request.drawn
            served.listener(NewTokens(request.index, new.copy(), request.spans, reason))
