"""The HTTP server: routes, who may ask, and how long it waits for whom. Needs the extra `http`."""

import asyncio
import hmac
import ipaddress
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dapo_jax.sampling.requests import OwnOptions
from dapo_jax.serving.http_answers import Answer, ChatAnswer, error_json, generate_json, to_json
from dapo_jax.serving.http_connections import Connections
from dapo_jax.serving.http_fields import Fields, RequestError, read_body
from dapo_jax.serving.http_requests import Limits, SampleRequest, read_chat, read_generate
from dapo_jax.serving.request_loop import Progress, QueueFullError, RequestLoop, seeded_key, stop_rule
from dapo_jax.terminal import visible
from dapo_jax.text.stop_strings import StopStrings

_PATIENCE_S = 60
"""Seconds that a client may take to send a body, or to take what is streamed to it."""
_SHUTDOWN_S = 10
"""Seconds that requests have to finish when the server is told to stop."""
_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""The largest body: so much, and for each token of the longest prompt so much more."""
_RETRY_S = 1
_MORE_OPEN = 256
"""Requests that may be open beyond the responses that the server takes: their bodies are in memory."""

_MORE_CONNECTIONS = 64
"""Connections beyond the requests that may be open, whose clients are told so."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Answers requests from `start` to `stop`, in a thread of its own; a context manager.

    Args:
        requests: what samples; started and stopped by others.
        limits: of requests.
        host: the interface, such as 127.0.0.1, or [::] for all.
        port: 0 lets the system choose.
        api_key: every route but `/health` needs it as a bearer token; empty: none is needed.
        say: told of errors that are the server's own.
    """

    def __init__(
        self, requests: RequestLoop, limits: Limits, *, host: str, port: int, api_key: str, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        self.address = f"{host}:{port}"
        """HOST:PORT, the port that was taken once it has started."""
        self._requests, self._limits, self._say = requests, limits, say
        self._host, self._port, self._api_key = host, port, api_key.encode()
        self._created, self._stopping, self._open = int(time.time()), False, 0
        most = limits.most_responses + _MORE_OPEN + _MORE_CONNECTIONS
        self._connections = Connections(
            most,
            lambda status, said: _error(_own_failure() if status >= 500 else _malformed(said, status)),
            say,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http server", daemon=True)
        self._runner: web.AppRunner | None = None

    def start(self) -> None:
        """Listens.

        Raises:
            OSError: nothing can listen there.
        """
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except BaseException:
            self._end_thread()
            raise

    def stop(self) -> None:
        """Refuses new requests, lets those in flight finish for 10 s, and ends what is left."""
        self._stopping = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._end_thread()

    def __enter__(self) -> "HttpServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

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
        # A client that leaves cancels its handler, and so its responses.
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
        """Logs in one line what no request is to blame for."""
        error = context.get("exception")
        if not isinstance(error, ConnectionError):
            self._say(visible(f"the HTTP server: {context.get('message')}: {error!r:.200}"))

    # Who may ask, and how errors are told.

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
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
            raise  # nobody is there to be told
        except Exception as error:
            self._say(visible(f"{request.method} {request.path} failed with {type(error).__name__}: {error}"))
            return _error(_own_failure())
        finally:
            self._open -= 1
            self._connections.idles(request.protocol)

    def _check(self, request: web.Request) -> None:
        """Refuses who may not ask."""
        if request.path == "/health":
            return
        if self._api_key:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            known = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._api_key)
            if not known or scheme.lower() != "bearer":
                raise RequestError(
                    "the header Authorization must be Bearer and the key that the server was started with",
                    status=401, code="invalid_api_key", kind="authentication_error",
                )  # fmt: skip
        elif not is_loopback(_name_of(request.headers.get("Host", ""))):
            # A page that a browser shows may have its own name mean this machine.
            raise RequestError(
                f"the header Host is {request.headers.get('Host', '')[:80]!r}; a server without a key answers to localhost and loopback addresses alone",
                status=403, code="invalid_host",
            )  # fmt: skip
        if self._stopping:
            raise RequestError("the server is stopping", status=503, code="stopping", kind="server_error")
        if self._open > (most := self._limits.most_responses + _MORE_OPEN):
            raise RequestError(
                f"{self._open} requests are open; the server takes {most}: ask again later, or serve with a larger --queue",
                status=503, code="queue_full", kind="server_error", retry_after_s=_RETRY_S,
            )  # fmt: skip

    def _of_aiohttp(self, request: web.Request, error: web.HTTPException) -> RequestError:
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            return RequestError(
                f"the body is larger than {request._client_max_size} bytes, the most that a prompt of {self._limits.max_prompt_tokens} tokens may take: "
                "shorten it, or serve with a larger --max-prompt-tokens",
                status=413, code="body_too_large",
            )  # fmt: skip
        if isinstance(error, web.HTTPMethodNotAllowed):
            wanted = " or ".join(sorted(error.allowed_methods - {"HEAD"}))
            return RequestError(
                f"{request.path[:80]} takes {wanted}; found {request.method[:20]}",
                status=405,
                code="method_not_allowed",
            )
        if error.status == 404:
            routes = "/inference/v1/generate, /v1/chat/completions, /v1/models and /health"
            return RequestError(
                f"there is nothing at {request.path[:80]}; there are {routes}", status=404, code="not_found"
            )
        return RequestError(error.reason, status=error.status)

    # The routes.

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._stopping or self._requests.ended.is_set():
            raise RequestError("the server is stopping", status=503, code="stopping", kind="server_error")
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
        asked = read_generate(await self._body(request), self._limits)
        answers = [Answer() for _ in range(asked.sample.count)]
        async with self._sampled(asked.sample) as progress:
            async for each in progress:
                answers[each.index].add(each)
        name = asked.request_id or f"generate-{uuid.uuid4().hex}"
        limits = self._limits
        return _json(generate_json(asked, answers, limits.tokenizer, request_id=name, model=limits.model))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        # In a thread: a prompt of megabytes takes long, and others are answered meanwhile.
        asked = await asyncio.to_thread(read_chat, body, self._limits)
        name, tokenizer = f"chatcmpl-{uuid.uuid4().hex}", self._limits.tokenizer
        answer = ChatAnswer(asked, tokenizer, name=name, model=self._limits.model)
        async with self._sampled(asked.sample, streams=asked.stream) as progress:
            if asked.stream:
                return await _streamed(request, answer, progress)
            async for each in progress:
                answer.answers[each.index].add(each)
        return _json(answer.whole())

    async def _body(self, request: web.Request) -> Fields:
        body = await _body(request)
        self._connections.works(request.protocol)
        return body

    @asynccontextmanager
    async def _sampled(
        self, sample: SampleRequest, *, streams: bool = False
    ) -> AsyncIterator[AsyncIterator[Progress]]:
        """The responses as they grow; leaving ends those that have not ended."""
        came: asyncio.Queue[Progress | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(progress: Progress | BaseException) -> None:
            with suppress(RuntimeError):  # the server has stopped, and nobody listens
                loop.call_soon_threadsafe(came.put_nowait, progress)

        strings = StopStrings(self._limits.tokenizer, sample.stop).find if sample.stop else None
        options = OwnOptions(
            decoding=sample.decoding,
            key=None if sample.seed is None else seeded_key(sample.seed),
            stop=stop_rule(strings, sample.stop_token_ids),
        )
        try:
            served = self._requests.submit(
                sample.prompt, options, count=sample.count, max_tokens=sample.max_tokens, listener=listener, streams=streams
            )  # fmt: skip
        except QueueFullError as error:
            raise RequestError(
                f"{error}: ask again later, or serve with a larger --queue",
                status=503, code="queue_full", kind="server_error", retry_after_s=_RETRY_S,
            ) from error  # fmt: skip
        except RuntimeError as error:
            raise RequestError(str(error), status=503, code="stopping", kind="server_error") from error

        async def progress() -> AsyncIterator[Progress]:
            left = sample.count
            while left:
                new = await came.get()
                if isinstance(new, BaseException):
                    raise RequestError(
                        "the server stopped before the response had ended",
                        status=503,
                        code="stopping",
                        kind="server_error",
                    )
                yield new
                left -= new.finish_reason is not None

        try:
            yield progress()
        finally:
            self._requests.cancel(served)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an interface, by its name or address."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def _own_failure() -> RequestError:
    text = "the server has failed at this request; its own messages say how"
    return RequestError(text, status=500, code="internal_error", kind="server_error")


def _malformed(said: str, status: int = 400) -> RequestError:
    return RequestError(
        f"the request is not HTTP that can be read: {visible(said)!s:.200}", status=status, code="malformed"
    )


def _name_of(host: str) -> str:
    """The name or address in a header Host, without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


async def _body(request: web.Request) -> Fields:
    """The JSON object of a request.

    Raises:
        RequestError: it is another content type, none, not JSON, or does not come.
    """
    if request.content_type != "application/json":
        raise RequestError(
            f"the header Content-Type is {request.headers.get('Content-Type', '')[:80]!r}; the server takes application/json",
            status=415, code="unsupported_media_type",
        )  # fmt: skip
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise RequestError(
            f"the header Content-Encoding is {encoding[:80]!r}; the server takes bodies as they are",
            status=415, code="unsupported_media_type",
        )  # fmt: skip
    try:
        async with asyncio.timeout(_PATIENCE_S):
            content = await request.read()
    except TimeoutError as error:
        raise RequestError(
            f"the body has not come within {_PATIENCE_S} s", status=408, code="timeout"
        ) from error
    return read_body(content)


async def _streamed(
    request: web.Request, answer: ChatAnswer, progress: AsyncIterator[Progress]
) -> web.StreamResponse:
    """Server-sent events, a chunk each."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)

    async def send(chunks: Sequence[Mapping[str, Any] | None]) -> None:
        events = [b"data: " + to_json(chunk) + b"\n\n" for chunk in chunks if chunk is not None]
        if events:
            await _written(response, b"".join(events))

    try:
        await send(answer.first_chunks())
        async for each in progress:
            await send([answer.chunk(each)])
        await send([answer.usage_chunk()])
    except RequestError as error:  # the status is sent: the stream itself has to say it
        await send([error_json(error)])
        return response
    await _written(response, b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _written(response: web.StreamResponse, content: bytes) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await response.write(content)
    except TimeoutError as error:
        raise ConnectionResetError(f"the client took nothing for {_PATIENCE_S} s") from error


def _json(content: Mapping[str, Any]) -> web.Response:
    return web.Response(body=to_json(content), content_type="application/json")


def _error(error: RequestError) -> web.Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=to_json(error_json(error)), status=error.status, headers=headers, content_type="application/json"
    )
