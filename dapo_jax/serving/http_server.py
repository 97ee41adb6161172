"""The HTTP server: routes, access control and time limits. Needs the `http` extra."""

import asyncio
import hmac
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dapo_jax.serving.http_answers import ChatAnswer, GenerateAnswer
from dapo_jax.serving.http_connections import Connections
from dapo_jax.serving.http_requests import read_chat, read_generate
from dapo_jax.serving.request_loop import NewTokens, RequestError, RequestLoop, stopping
from dapo_jax.serving.served_requests import GRACE_S, CheckedRequest, ServedLimits, ServerThread, sampled
from dapo_jax.terminal import visible

_PATIENCE_S = 60
"""Maximum number of seconds for a client to send a request body, or to receive one chunk of a stream."""
_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""Maximum size of a request body: a fixed number of bytes, plus a number of bytes for each token that a prompt may have."""
_MORE_CONNECTIONS = 320
"""Number of connections allowed in addition to one per response, so that a server with a full queue can still answer new requests with an error."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer(ServerThread):
    """Serves a `RequestLoop` over HTTP.

    Args:
        requests: the loop that samples responses. The caller starts and stops it.
        limits: the limits for requests.
        host, port: see `ServerThread`.
        api_key: bearer token that every route except `/health` requires. If empty, no key is required.
        say: logs errors in the server itself.
    """

    def __init__(
        self, requests: RequestLoop, limits: ServedLimits, *, host: str, port: int, api_key: str, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        super().__init__(host, port)
        self._requests, self._limits, self._say, self._api_key = requests, limits, say, api_key.encode()
        self._created, self._stopping = int(time.time()), False
        self._connections = Connections(
            limits.most_responses + _MORE_CONNECTIONS,
            lambda status, reason: _error(_own_failure() if status >= 500 else _malformed(reason, status)),
            say,
        )

    async def _listen(self) -> int:
        most = _BODY_BYTES + _BODY_BYTES_PER_TOKEN * self._limits.max_prompt_tokens
        app = web.Application(middlewares=[self._guard], client_max_size=most)
        app.router.add_post("/inference/v1/generate", partial(self._sample, read_generate, GenerateAnswer))
        app.router.add_post("/v1/chat/completions", partial(self._sample, read_chat, ChatAnswer))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        # If a client disconnects, aiohttp cancels the request's handler, which then cancels the request's responses.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=GRACE_S)
        await self._runner.setup()
        assert self._runner.server is not None
        self._loop.set_exception_handler(self._failed)
        return self._connections.listen(self._host.strip("[]"), self._port, self._runner.server)

    async def _close(self) -> None:
        self._stopping = True
        await self._connections.close()
        await self._runner.cleanup()
        await self._loop.shutdown_default_executor()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Logs an error that does not belong to any request, on one line."""
        error = context.get("exception")
        if not isinstance(error, ConnectionError):
            self._say(visible(f"the HTTP server: {context.get('message')}: {error!r:.200}"))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks whether the client may send the request, and converts every error to a response."""
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
            raise  # the client has disconnected, so no answer can be sent
        except Exception as error:
            self._say(visible(f"{request.method} {request.path} failed with {type(error).__name__}: {error}"))
            return _error(_own_failure())
        finally:
            self._connections.waits(request.protocol)

    def _check(self, request: web.Request) -> None:
        """Raises a `RequestError` if the request is not authorized, or if the server is stopping."""
        if request.path == "/health":
            return
        if self._api_key:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            known = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._api_key)
            if not known or scheme.lower() != "bearer":
                raise RequestError(
                    "the Authorization header must be `Bearer KEY` with the key that the server was started with",
                    status=401, code="invalid_api_key",
                )  # fmt: skip
        elif not is_loopback(_name_of(request.headers.get("Host", ""))):
            # Otherwise, a web page in a local browser could reach the server through a domain that resolves to a loopback address.
            raise RequestError(
                f"the Host header is {request.headers.get('Host', '')[:80]!r}; a server without a key accepts only localhost and loopback addresses",
                status=403, code="invalid_host",
            )  # fmt: skip
        if self._stopping:
            raise stopping()

    def _of_aiohttp(self, request: web.Request, error: web.HTTPException) -> RequestError:
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            return RequestError(
                f"the body is larger than {request._client_max_size} bytes, the limit for prompts of up to {self._limits.max_prompt_tokens} tokens: "
                "shorten it, or serve with a larger --max-prompt-tokens",
                status=413, code="body_too_large",
            )  # fmt: skip
        if error.status in (404, 405):
            return RequestError(
                f"{visible(request.method[:20])} {visible(request.path[:80])} does not exist; the server has "
                "POST /inference/v1/generate, POST /v1/chat/completions, GET /v1/models and GET /health",
                status=error.status, code="not_found" if error.status == 404 else "method_not_allowed",
            )  # fmt: skip
        return RequestError(error.reason, status=error.status)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._stopping or self._requests.ended.is_set():
            raise stopping()
        return _json({"status": "ok", "weights_version": self._requests.version})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        prompt, response = self._limits.max_prompt_tokens, self._limits.max_response_tokens
        card = {"id": self._limits.model, "object": "model", "created": self._created, "owned_by": "dapo_jax"}
        card |= {
            "max_model_len": prompt + response,
            "max_prompt_tokens": prompt,
            "max_response_tokens": response,
        }
        return _json({"object": "list", "data": [{**card, "weights_version": self._requests.version}]})

    async def _sample(
        self,
        read: Callable[[bytes, ServedLimits], CheckedRequest],
        kind: type[GenerateAnswer],
        request: web.Request,
    ) -> web.StreamResponse:
        """Answers a sampling request. `read` parses the request body, and `kind` builds the answer."""
        limits, content = self._limits, await _body(request)
        self._connections.works(request.protocol)
        # Parsing runs in a thread, because tokenizing a prompt of several megabytes must not delay other requests.
        asked = await asyncio.to_thread(read, content, limits)
        answer = kind(asked, limits)
        async with sampled(self._requests, asked) as arriving:
            if asked.stream and isinstance(answer, ChatAnswer):
                return await _streamed(request, answer, arriving)
            async for new in arriving:
                answer.add(new)
        return _json(answer.whole())


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address can be reached only from this machine."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def _error_object(error: RequestError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    kind = "server_error" if error.status >= 500 else kind
    return {"error": {"message": str(error), "type": kind, "code": error.code}}


def _own_failure() -> RequestError:
    text = "the server failed to answer this request; its log has the reason"
    return RequestError(text, status=500, code="internal_error")


def _malformed(reason: str, status: int = 400) -> RequestError:
    text = f"the request is not valid HTTP: {visible(reason)!s:.200}"
    return RequestError(text, status=status, code="malformed")


def _name_of(host: str) -> str:
    """Returns the name or address in a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


async def _body(request: web.Request) -> bytes:
    """Returns the body of a request.

    Raises:
        RequestError: the content type or encoding is not supported, or the body does not arrive in time.
    """
    for name, found, needed in (
        ("Content-Type", request.content_type, "application/json"),
        ("Content-Encoding", request.headers.get("Content-Encoding", "identity"), "identity"),
    ):
        if found != needed:
            text = f"the header {name} is {found[:80]!r}; the server accepts {needed}"
            raise RequestError(text, status=415, code="unsupported_media_type")
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await request.read()
    except TimeoutError as error:
        text = f"the body did not arrive within {_PATIENCE_S} s"
        raise RequestError(text, status=408, code="timeout") from error


async def _streamed(
    request: web.Request, answer: ChatAnswer, arriving: AsyncIterator[NewTokens]
) -> web.StreamResponse:
    """Streams an answer as server-sent events, one per chunk."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)

    async def send(*chunks: Mapping[str, Any] | msgspec.Raw | None) -> None:
        events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks if chunk is not None]
        if not events:
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await response.write(b"".join(events))
        except TimeoutError as error:
            raise ConnectionResetError(f"the client received nothing for {_PATIENCE_S} s") from error

    try:
        await send(*answer.first_chunks())
        async for new in arriving:
            await send(answer.chunk(new))
        await send(answer.usage_chunk())
    except RequestError as error:  # sent as an event, because the HTTP status has already been sent
        await send(_error_object(error))
        return response
    await send(msgspec.Raw(b"[DONE]"))
    await response.write_eof()
    return response


def _json(content: Mapping[str, Any], **how: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json", **how)


def _error(error: RequestError) -> web.Response:
    headers = {"Retry-After": "1"} if error.code == "queue_full" else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(_error_object(error), status=error.status, headers=headers)
