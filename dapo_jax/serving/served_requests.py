"""Code that both servers share: checking requests, receiving sampled tokens, and running a server in its own thread."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
from jaxtyping import Int

from dapo_jax.sampling.decoding import DecodingOptions
from dapo_jax.sampling.requests import OwnOptions
from dapo_jax.serving.request_loop import NewTokens, RequestLoop, stopping
from dapo_jax.text.http import RequestError
from dapo_jax.text.tokenizers import Tokenizer

GRACE_S = 10
"""Seconds that running requests have to finish when a server stops."""


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A request whose prompt has been tokenized and whose values are within the server's limits."""

    prompt: Int[np.ndarray, " prompt"]
    max_tokens: int
    count: int = 1
    """Number of responses to sample for the prompt."""
    options: OwnOptions
    """The request's own sampling options. If they contain no PRNG key, repeating the request samples different responses."""
    stop: tuple[tuple[str, ...], Sequence[int]] = (), ()
    """The stop strings and the stop ids, which are not included in the returned text."""
    logprobs: bool = False
    top_logprobs: int = 0
    """Number of most probable tokens to return at each position, with their log-probabilities."""
    request_id: str = ""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether log-probabilities identify tokens by id instead of by text."""
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    """Whether the prompt is scored (see `RequestLoop.submit`)."""


@dataclass(frozen=True, kw_only=True)
class ServedLimits:
    """A server's limits for requests, with the tokenizer and the default values that it uses to parse requests."""

    model: str
    """Name of the model. Requests may omit it."""
    tokenizer: Tokenizer
    vocabulary: int
    """Number of token ids in the model's vocabulary. The tokenizer may have fewer."""
    max_prompt_tokens: int
    max_response_tokens: int
    most_responses: int
    """Maximum number of running and waiting responses. This is also the maximum value of `n` in a request."""
    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    """Default decoding options for requests."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Default values for `chat_template_kwargs`."""
    top_logprobs: int = 0
    """Maximum value of `top_logprobs` in a request."""
    today: date | None = None  # the date that some chat templates print

    def request(
        self, prompt: Int[np.ndarray, " prompt"], max_tokens: int, *, count: int = 1, named: str = "max_tokens", **others: Any
    ) -> CheckedRequest:  # fmt: skip
        """Checks and returns a request. `named` is the name of the field that set `max_tokens`, for error messages. Raises RequestError if the prompt is empty
        or too long, or `max_tokens` or `count` is zero or too large."""
        for name, unit, value, most, option in (
            ("the prompt has", " tokens", len(prompt), self.max_prompt_tokens, "--max-prompt-tokens"),
            (f"{named} is", "", max_tokens, self.max_response_tokens, "--max-response-tokens"),
            ("n is", "", count, self.most_responses, "--queue"),
        ):
            if not 0 < value <= most:
                larger = f"{'shorten' if unit else 'lower'} it, or serve with a larger {option}"
                remedy = larger if value > most else "use 1 or more"
                raise RequestError(
                    f"{name} {value}{unit}; the server accepts 1 to {most}: {remedy}",
                    code="context_length_exceeded" if unit and value else "invalid_value",
                )
        options = others.pop("options", None) or OwnOptions(decoding=self.decoding)
        return CheckedRequest(prompt=prompt, max_tokens=max_tokens, count=count, options=options, **others)

    def checked_ids(self, name: str, ids: Sequence[int]) -> Sequence[int]:
        """Returns `ids`, or raises RequestError if an id is outside the vocabulary."""
        if outside := [token for token in ids if not 0 <= token < self.vocabulary]:
            raise RequestError(
                f"{name} has the token id {outside[0]}, which is not in the vocabulary of {self.vocabulary} ids, 0 to {self.vocabulary - 1}"
            )
        return ids


@asynccontextmanager
async def sampled(requests: RequestLoop, asked: CheckedRequest) -> AsyncIterator[AsyncIterator[NewTokens]]:
    """Submits a request, and yields an iterator over the new tokens of its responses. Leaving the context cancels unfinished responses. Raises RequestError if
    the queue is full, the loop is stopping, or a log-probability is not finite."""
    queue: asyncio.Queue[NewTokens | BaseException] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listener(new: NewTokens | BaseException) -> None:
        with suppress(RuntimeError):  # the server's event loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, new)

    served = requests.submit(
        asked.prompt, asked.options, count=asked.count, max_tokens=asked.max_tokens, listener=listener, streams=asked.stream,
        scores=asked.echo,
    )  # fmt: skip

    async def arriving() -> AsyncIterator[NewTokens]:
        left = asked.count
        while left:
            new = await queue.get()
            if isinstance(new, BaseException):
                raise stopping() from new
            if not np.isfinite(new.record.logprobs).all():
                text = "log-probabilities are not finite with these weights: serve another checkpoint"
                raise RequestError(text, status=500, code="not_finite")
            yield new
            left -= new.finish_reason is not None

    try:
        yield arriving()
    finally:
        requests.cancel(served)


class ServerThread(ABC):
    """A server whose event loop runs in its own thread. It is a context manager. The host [::] means all network interfaces, and the port 0 any free port."""

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        """HOST:PORT. Once the server has started, PORT is the port in use."""
        self._host, self._port = host, port

    @abstractmethod
    async def _listen(self) -> int:
        """Starts to accept requests, and returns the port."""

    @abstractmethod
    async def _close(self) -> None:
        """Refuses new requests, gives running requests `GRACE_S` seconds to finish, and then cancels the rest."""

    def __enter__(self) -> "ServerThread":
        """Starts the server. Raises OSError if the address cannot be bound."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
        self._thread.start()
        try:
            self.address = f"{self._host}:{self._result(self._listen())}"
        except (OSError, RuntimeError) as error:
            self.__exit__()
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"cannot listen on {self.address}: {reason}; --port 0 picks a free port") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._result(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _result(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
