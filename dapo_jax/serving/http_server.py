"""The HTTP server: routes, access control and time limits. Needs the extra `http`."""

import asyncio
import hmac
import ipaddress
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dapo_jax.sampling.requests import OwnOptions
from dapo_jax.serving.http_answers import Answer, ChatAnswer, generate_json
from dapo_jax.serving.http_connections import Connections
from dapo_jax.serving.http_requests import HttpRequest, RequestError, ServedLimits, read_chat, read_generate
from dapo_jax.serving.request_loop import NewTokens, QueueFullError, RequestLoop, seeded_key, stop_rule
from dapo_jax.terminal import visible
from dapo_jax.text.stop_strings import StopStrings

_PATIENCE_S = 60
"""Seconds that a client may take to send a body, or to receive a chunk of a stream."""
_SHUTDOWN_S = 10
"""Seconds that running requests have to finish when the server stops."""
_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""The largest body: so many bytes, and so many more per token of the longest prompt."""
_MORE_OPEN = 256
"""Requests that may be open beyond the responses that may run or wait. Their bodies are in memory."""
_MORE_CONNECTIONS = 64
"""Connections beyond the open requests; their clients get an error instead of no answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Answers requests in a thread of its own; a context manager.

    Args:
        requests: samples responses; started and stopped by the caller.
        limits: limits of requests.
        host: the interface, such as 127.0.0.1, or [::] for all.
        port: 0 takes a free port.
        api_key: bearer token that every route except `/health` needs; empty: no key is needed.
        say: logs errors of the server itself.
    """

    def __init__(
        self, requests: RequestLoop, limits: ServedLimits, *, host: str, port: int, api_key: str, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        self.address = f"{host}:{port}"
        """HOST:PORT, with the port that was taken."""
        self._requests, self._limits, self._say = requests, limits, say
        self._host, self._port, self._api_key = host, port, api_key.encode()
        self._created, self._stopping, self._open = int(time.time()), False, 0
        self._most_open = limits.most_responses + _MORE_OPEN
        self._connections = Connections(
            self._most_open + _MORE_CONNECTIONS,
            lambda status, reason: _error(_own_failure() if status >= 500 else _malformed(reason, status)),
            say,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http server", daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> "HttpServer":
        """Listens.

        Raises:
            OSError: the address cannot be bound.
        """
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Refuses new requests, gives running ones 10 s to finish, and ends the rest."""
        self._stopping = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._end_thread()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        most = _BODY_BYTES + _BODY_BYTES_PER_TOKEN * self._limits.max_prompt_tokens
        app = web.Application(middlewares=[self._guard], client_max_size=most)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        # A client that leaves cancels its handler, and thereby its responses.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        assert self._runner.server is not None
        asyncio.get_running_loop().set_exception_handler(self._failed)
        try:
            port = self._connections.listen(self._host.strip("[]"), self._port, self._runner.server)
        except OSError as error:
            await self._runner.cleanup()
            raise OSError(
                f"cannot listen at {self.address}: {error.strerror or error}; --port 0 takes a free port"
            ) from error
        self.address = f"{self._host}:{port}"

    async def _close(self) -> None:
        await self._connections.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._loop.shutdown_default_executor()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Logs an error outside of all requests in one line."""
        error = context.get("exception")
        if not isinstance(error, ConnectionError):
            self._say(visible(f"the HTTP server: {context.get('message')}: {error!r:.200}"))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks who asks, and turns every error into an answer."""
        self._open += 1
        self._connections.waits(request.protocol, _PATIENCE_S + 1.0)
        try:
            self._check(request)
            return await handler(request)
        except RequestError as error:
            return _error(error)
        except (web.RequestPayloadError, HttpProcessingError) as error:
            return _error(_malformed(f"{type(error).__name__} {error}"))
        except web.HTTPException as error:
            return _error(self._of_aiohttp(request, error))
        except (ConnectionError, asyncio.CancelledError):
            raise  # the client has left
        except Exception as error:
            self._say(visible(f"{request.method} {request.path} failed with {type(error).__name__}: {error}"))
            return _error(_own_failure())
        finally:
            self._open -= 1
            self._connections.idles(request.protocol)

    def _check(self, request: web.Request) -> None:
        """Raises a `RequestError` if the request has no right to be answered, or the server no room for it."""
        if request.path == "/health":
            return
        if self._api_key:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            known = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._api_key)
            if not known or scheme.lower() != "bearer":
                raise RequestError(
                    "the header Authorization must be Bearer and the key that the server was started with",
                    status=401, code="invalid_api_key",
                )  # fmt: skip
        elif not is_loopback(_name_of(request.headers.get("Host", ""))):
            # Otherwise a web page in a browser could reach the server by a name that resolves to this machine.
            raise RequestError(
                f"the header Host is {request.headers.get('Host', '')[:80]!r}; a server without a key answers to localhost and loopback addresses only",
                status=403, code="invalid_host",
            )  # fmt: skip
        if self._stopping:
            raise _stopping()
        if self._open > self._most_open:
            raise _busy(f"{self._open} requests are open; the server takes {self._most_open}")

    def _of_aiohttp(self, request: web.Request, error: web.HTTPException) -> RequestError:
        path = visible(request.path[:80])
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            return RequestError(
                f"the body is larger than {request._client_max_size} bytes, the most that a prompt of {self._limits.max_prompt_tokens} tokens may take: "
                "shorten it, or serve with a larger --max-prompt-tokens",
                status=413, code="body_too_large",
            )  # fmt: skip
        if isinstance(error, web.HTTPMethodNotAllowed):
            wanted = " or ".join(sorted(error.allowed_methods - {"HEAD"}))
            text = f"{path} takes {wanted}; found {request.method[:20]}"
            return RequestError(text, status=405, code="method_not_allowed")
        if error.status == 404:
            routes = "/inference/v1/generate, /v1/chat/completions, /v1/models and /health"
            text = f"there is nothing at {path}; there are {routes}"
            return RequestError(text, status=404, code="not_found")
        return RequestError(error.reason, status=error.status)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._stopping or self._requests.ended.is_set():
            raise _stopping()
        return _json({"status": "ok", "weights_version": self._requests.version})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        limits = self._limits
        card = {
            "id": limits.model,
            "object": "model",
            "created": self._created,
            "owned_by": "dapo_jax",
            "max_model_len": limits.max_prompt_tokens + limits.max_response_tokens,
            "max_prompt_tokens": limits.max_prompt_tokens,
            "max_response_tokens": limits.max_response_tokens,
            "weights_version": self._requests.version,
        }
        return _json({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        limits = self._limits
        asked = read_generate(await self._body(request), limits)
        answers = [Answer() for _ in range(asked.count)]
        async with self._sampled(asked) as arriving:
            async for new in arriving:
                answers[new.index].add(new)
        name = asked.request_id or f"generate-{uuid.uuid4().hex}"
        return _json(generate_json(asked, answers, limits.tokenizer, request_id=name, model=limits.model))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        limits = self._limits
        # In a thread: tokenizing a prompt of megabytes must not delay other requests.
        asked = await asyncio.to_thread(read_chat, await self._body(request), limits)
        answer = ChatAnswer(asked, limits.tokenizer, name=f"chatcmpl-{uuid.uuid4().hex}", model=limits.model)
        async with self._sampled(asked) as arriving:
            if asked.stream:
                return await _streamed(request, answer, arriving)
            async for new in arriving:
                answer.answers[new.index].add(new)
        return _json(answer.whole())

    async def _body(self, request: web.Request) -> bytes:
        content = await _body(request)
        self._connections.works(request.protocol)
        return content

    @asynccontextmanager
    async def _sampled(self, asked: HttpRequest) -> AsyncIterator[AsyncIterator[NewTokens]]:
        """Yields the tokens of a request's responses as they arrive. Leaving the context ends unfinished responses."""
        queue: asyncio.Queue[NewTokens | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(new: NewTokens | BaseException) -> None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(queue.put_nowait, new)

        strings = StopStrings(self._limits.tokenizer, asked.stop).find if asked.stop else None
        options = OwnOptions(
            decoding=asked.decoding,
            key=None if asked.seed is None else seeded_key(asked.seed),
            stop=stop_rule(strings, asked.stop_token_ids),
        )
        try:
            served = self._requests.submit(
                asked.prompt, options, count=asked.count, max_tokens=asked.max_tokens, listener=listener, streams=asked.stream
            )  # fmt: skip
        except QueueFullError as error:
            raise _busy(str(error)) from error
        except RuntimeError as error:
            raise _stopping() from error

        async def arriving() -> AsyncIterator[NewTokens]:
            left = asked.count
            while left:
                new = await queue.get()
                if isinstance(new, BaseException):
                    raise _stopping() from new
                yield new
                left -= new.finish_reason is not None

        try:
            yield arriving()
        finally:
            self._requests.cancel(served)


def is_loopback(host: str) -> bool:
    """Returns whether a name or address can be reached from this machine only."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def _stopping() -> RequestError:
    return RequestError("the server is stopping", status=503, code="stopping")


def _busy(reason: str) -> RequestError:
    text = f"{reason}: ask again later, or serve with a larger --queue"
    return RequestError(text, status=503, code="queue_full", retry_after_s=1)


def _own_failure() -> RequestError:
    text = "the server failed to answer this request; its log has the reason"
    return RequestError(text, status=500, code="internal_error")


def _malformed(reason: str, status: int = 400) -> RequestError:
    text = f"the request is not HTTP that can be read: {visible(reason)!s:.200}"
    return RequestError(text, status=status, code="malformed")


def _name_of(host: str) -> str:
    """Returns the name or address in a header Host, without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


async def _body(request: web.Request) -> bytes:
    """Returns the body of a request.

    Raises:
        RequestError: it has another content type or encoding, or does not arrive in time.
    """
    for name, found, needed in (
        ("Content-Type", request.content_type, "application/json"),
        ("Content-Encoding", request.headers.get("Content-Encoding", "identity"), "identity"),
    ):
        if found != needed:
            text = f"the header {name} is {found[:80]!r}; the server takes {needed}"
            raise RequestError(text, status=415, code="unsupported_media_type")
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await request.read()
    except TimeoutError as error:
        text = f"the body has not arrived within {_PATIENCE_S} s"
        raise RequestError(text, status=408, code="timeout") from error


async def _streamed(
    request: web.Request, answer: ChatAnswer, arriving: AsyncIterator[NewTokens]
) -> web.StreamResponse:
    """Sends server-sent events, one per chunk."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)

    async def send(chunks: Sequence[Mapping[str, Any] | None]) -> None:
        events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks if chunk is not None]
        if events:
            await _written(response, b"".join(events))

    try:
        await send(answer.first_chunks())
        async for new in arriving:
            await send([answer.chunk(new)])
        await send([answer.usage_chunk()])
    except RequestError as error:  # the status is sent already
        await send([error.content])
        return response
    await _written(response, b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _written(response: web.StreamResponse, content: bytes) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await response.write(content)
    except TimeoutError as error:
        raise ConnectionResetError(f"the client received nothing for {_PATIENCE_S} s") from error


def _json(content: Mapping[str, Any], **how: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json", **how)


def _error(error: RequestError) -> web.Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(error.content, status=error.status, headers=headers)
