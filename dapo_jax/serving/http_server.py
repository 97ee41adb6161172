"""The HTTP server: routes, access control, time limits, and answers in the formats that vLLM and OpenAI clients expect. Needs the `http` extra."""

import asyncio
import hmac
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from itertools import accumulate, islice
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from dapo_jax.dapo.tokens import HEADS
from dapo_jax.serving.http_connections import Connections
from dapo_jax.serving.http_requests import read_chat, read_completions, read_generate
from dapo_jax.serving.request_loop import NewTokens, RequestLoop, stopping
from dapo_jax.serving.served_requests import GRACE_S, CheckedRequest, ServedLimits, ServerThread, sampled
from dapo_jax.serving.text import GrowingText, token_name
from dapo_jax.terminal import visible
from dapo_jax.text.http import PATIENCE_S, RequestError, error_object, host_name, is_loopback, read_body
from dapo_jax.text.special_tokens import Before
from dapo_jax.text.tokenizers import token_bytes

_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""Maximum size of a request body: a fixed number of bytes, plus a number of bytes for each token that a prompt may have."""
_ANSWERS = web.RequestKey("answers", list)
"""The answers to a request, whose numbers of tokens are logged."""
_MORE_CONNECTIONS = 320
"""Number of connections allowed in addition to one per response, so that a server with a full queue can still answer new requests with an error."""

_METRICS = {
    "requests_total": ("counter", "Requests by HTTP status."),
    "prompt_tokens_total": ("counter", "Tokens of the prompts."),
    "sampled_tokens_total": ("counter", "Sampled tokens."),
    "request_seconds": ("histogram", "Seconds from a request to the end of its answer."),
    "responses_running": ("gauge", "Responses that are being sampled."),
    "responses_waiting": ("gauge", "Responses that wait for a slot."),
    "cache_used_ratio": ("gauge", "Share of the pages of the KV cache in use, from 0 to 1."),
    "weights_version": ("gauge", "Training step of the weights."),
}
"""The metrics of `GET /metrics`, each with its Prometheus type and its meaning. Their names begin with `dapo_jax_`."""
_BUCKETS = {
    f'request_seconds_bucket{{le="{bound}"}}': float(bound)
    for bound in ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "25.0", "50.0", "100.0", "+Inf")
}
"""Maps the buckets of the histogram to their upper bounds in seconds."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Counts:
    """Counts the requests since the start of the server, for `GET /metrics`."""

    def __init__(self) -> None:
        sums = ("prompt_tokens_total", "sampled_tokens_total", "request_seconds_sum")
        self._samples: dict[str, float | int] = dict.fromkeys((*_BUCKETS, *sums, "request_seconds_count"), 0)

    def add(self, status: str, prompt_tokens: int, sampled_tokens: int, seconds: float) -> None:
        """Adds one request."""
        added = dict.fromkeys((name for name, bound in _BUCKETS.items() if seconds <= bound), 1)
        added |= {f'requests_total{{status="{status}"}}': 1, "request_seconds_count": 1}
        tokens = {"prompt_tokens_total": prompt_tokens, "sampled_tokens_total": sampled_tokens}
        for name, value in {**added, **tokens, "request_seconds_sum": seconds}.items():
            self._samples[name] = self._samples.get(name, 0) + value

    def exposition(self, gauges: Mapping[str, float | int]) -> str:
        """Returns the counts and these gauges in Prometheus' text format 0.0.4."""
        samples, lines = {**self._samples, **gauges}, list[str]()
        for name, (kind, meaning) in _METRICS.items():
            lines += [f"# HELP dapo_jax_{name} {meaning}", f"# TYPE dapo_jax_{name} {kind}"]
            lines += [f"dapo_jax_{key} {value}" for key, value in samples.items() if key.startswith(name)]
        return "\n".join(lines) + "\n"


class GenerateAnswer:
    """The answer to a request to `/inference/v1/generate`."""

    def __init__(self, request: CheckedRequest, limits: ServedLimits) -> None:
        self._request, self._tokenizer, self._model = request, limits.tokenizer, limits.model
        self._latest: dict[int, NewTokens] = {}
        """The most recently received tokens of each response, by index. Without streaming, all tokens of a response arrive together."""
        self._sampled = 0

    def add(self, new: NewTokens) -> None:
        """Adds the new tokens of one response to the answer."""
        self._latest[new.index] = new
        self._sampled += len(new.record)

    def whole(self) -> dict[str, Any]:
        """Returns the complete answer. Every response must have ended."""
        name = self._request.request_id or f"generate-{uuid.uuid4().hex}"
        return {"request_id": name, "model": self._model, "choices": self._choices(), **self._totals()}

    def _choices(self) -> list[dict[str, Any]]:
        responses = sorted(self._latest.items())
        return [{"index": index, **self._choice(new), **_ending(new)} for index, new in responses]

    def _choice(self, new: NewTokens) -> dict[str, Any]:
        return {"token_ids": new.record.ids.tolist(), "logprobs": self._logprobs(new)}

    def _logprobs(self, new: NewTokens, *, named: bool = False) -> dict[str, Any] | None:
        """Returns the log-probabilities and bytes of new tokens, or None if not requested. If `named`, tokens are identified by text instead of id."""
        if not self._request.logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            content = token_bytes(self._tokenizer, token)
            name = token_name(self._tokenizer, token) if named else f"token_id:{token}"
            return {"token": name, "logprob": logprob, "bytes": None if content is None else list(content)}

        record, count = new.record, self._request.top_logprobs
        none = np.zeros((len(record), 0))
        ids, logprobs = (record.arrays.get(name, none)[:, :count].tolist() for name in HEADS)
        tops = [list(map(entry, *head)) for head in zip(ids, logprobs, strict=True)]
        sampled = map(entry, record.ids.tolist(), record.logprobs.tolist())
        return {"content": [{**one, "top_logprobs": top} for one, top in zip(sampled, tops, strict=True)]}

    def usage(self) -> dict[str, int]:
        """Returns the numbers of tokens of the prompt and of the responses so far."""
        prompt, sampled = len(self._request.prompt), self._sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _totals(self) -> dict[str, Any]:
        """Returns the token counts, and the oldest version of the weights that sampled any token in the answer."""
        oldest = min(new.spans[0].version for new in self._latest.values())
        return {"usage": self.usage(), "weights_version": oldest}


class ChatAnswer(GenerateAnswer):
    """The answer to a request to `/v1/chat/completions`, as one object or in chunks."""

    def __init__(self, request: CheckedRequest, limits: ServedLimits) -> None:
        super().__init__(request, limits)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": limits.model}
        self._prompt = {"prompt_token_ids": request.prompt.tolist()} if request.return_token_ids else {}
        self._texts = [GrowingText(limits.tokenizer, *request.stop) for _ in range(request.count)]

    def whole(self) -> dict[str, Any]:
        """Returns the complete answer. Every response must have ended."""
        fields = {"object": "chat.completion", "choices": self._choices(), **self._totals()}
        return {**self._head, **fields, **self._prompt}

    def _choice(self, new: NewTokens) -> dict[str, Any]:
        text = self._texts[new.index].add(new.record.ids.tolist(), last=True)
        return {"message": {"role": "assistant", "content": text}, **self._details(new)}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns one chunk per response, to be sent first. It contains the role but no tokens."""
        first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        chunks = [self._chunk({"index": index, **first}) for index in range(len(self._texts))]
        return [chunks[0] | self._prompt, *chunks[1:]]

    def chunk(self, new: NewTokens) -> dict[str, Any] | None:
        """Returns a chunk for new tokens, or None if there is nothing to send yet."""
        self.add(new)
        last, tokens = new.finish_reason is not None, new.record.ids.tolist()
        text = self._texts[new.index].add(tokens, last=last)
        asked = tokens and (self._request.logprobs or self._request.return_token_ids)
        if not (text or last or asked):
            return None
        choice = {"index": new.index, "delta": {"content": text} if text else {}, **self._details(new)}
        if not last:
            return self._chunk({**choice, "finish_reason": None})
        return self._chunk({**choice, **_ending(new)}) | {"weights_version": new.spans[0].version}

    def usage_chunk(self) -> dict[str, Any] | None:
        """Returns the final chunk with the token counts, or None if the request did not ask for the counts."""
        return self._chunk() | {"usage": self.usage()} if self._request.include_usage else None

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _details(self, new: NewTokens) -> dict[str, Any]:
        logprobs = {"logprobs": self._logprobs(new, named=not self._request.tokens_as_ids)}
        return (
            {**logprobs, "token_ids": new.record.ids.tolist()} if self._request.return_token_ids else logprobs
        )


class CompletionAnswer(GenerateAnswer):
    """The answer to one prompt of a request to `/v1/completions`."""

    def whole(self) -> dict[str, Any]:
        """Returns the choices and the totals. Every response must have ended."""
        choices = self._choices()
        self._sampled -= len(self._request.prompt) * self._request.echo
        return {"choices": choices, **self._totals()}

    def _choice(self, new: NewTokens) -> dict[str, Any]:
        # A stop string ends the response, but not the prompt before it.
        stop, ids = ((), ()) if self._request.echo else self._request.stop
        text = GrowingText(self._tokenizer, stop, ids, after=self._after).add(
            new.record.ids.tolist(), last=True
        )
        return {"text": text, "logprobs": self._table(new)}

    @property
    def _after(self) -> Before:
        """The tokens before the text of the answer."""
        return None if self._request.echo else self._request.prompt

    def _table(self, new: NewTokens) -> dict[str, Any] | None:
        """Returns the log-probabilities in the format of OpenAI's completions, or None if not requested. Only scored prompts have `top_logprobs`."""
        if not self._request.logprobs:
            return None
        tokens, tops = new.record.ids.tolist(), None
        logprobs = list[float | None](new.record.logprobs.tolist())
        names = [token_name(self._tokenizer, token) for token in tokens]
        text = GrowingText(self._tokenizer, after=self._after)
        offsets = [0, *accumulate(len(text.add([token])) for token in tokens[:-1])]
        if (scores := new.scores) is not None:
            actual = islice(zip(names, logprobs, strict=True), 1, None)
            top = [token_name(self._tokenizer, token) for token in scores.top.tolist()]
            best = zip(top, scores.top_logprobs.tolist(), strict=True)
            # If two tokens have the same text, the more likely token comes last and so remains.
            tops = [None, *map(dict, zip(actual, best, strict=False))]
            logprobs[0] = None
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


class HttpServer(ServerThread):
    """Serves a `RequestLoop`, which the caller starts and stops, over HTTP. Every route except `/health` requires the bearer token `api_key`, unless it is empty.
    `say` logs errors in the server itself."""

    def __init__(
        self, requests: RequestLoop, limits: ServedLimits, *, host: str, port: int, api_key: str, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        super().__init__(host, port)
        self._requests, self._limits, self._say, self._api_key = requests, limits, say, api_key.encode()
        self._created, self._stopping = int(time.time()), False
        self._counts = Counts()
        self._connections = Connections(
            limits.most_responses + _MORE_CONNECTIONS,
            lambda status, reason: _error(_own_failure() if status >= 500 else _malformed(reason, status)),
            say,
        )

    async def _listen(self) -> int:
        most = _BODY_BYTES + _BODY_BYTES_PER_TOKEN * self._limits.max_prompt_tokens
        app = web.Application(middlewares=[self._logged, self._guard], client_max_size=most)
        app.router.add_post("/inference/v1/generate", partial(self._sample, read_generate, GenerateAnswer))
        app.router.add_post("/v1/chat/completions", partial(self._sample, read_chat, ChatAnswer))
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
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
    async def _logged(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts a request. Writes a line with the request, the status, the tokens of the prompt and of the responses, and the seconds to standard error."""
        began, status = time.monotonic(), "disconnected"
        try:
            response = await handler(request)
            status = str(response.status)
            return response
        finally:
            usages = [answer.usage() for answer in request.get(_ANSWERS, ())]
            prompt, sampled_tokens = (
                sum(usage[kind] for usage in usages) for kind in ("prompt_tokens", "completion_tokens")
            )
            seconds = time.monotonic() - began
            if request.path not in ("/health", "/metrics"):  # monitoring polls these routes
                self._counts.add(status, prompt, sampled_tokens, seconds)
            line = f"{_named(request)} {status} {prompt}+{sampled_tokens} tokens {seconds:.2f} s"
            print(line, file=sys.stderr, flush=True)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks whether the client may send the request, and converts every error to a response."""
        self._connections.waits(request.protocol, PATIENCE_S + 1.0)
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
            self._say(
                f"{_named(request)} failed with {type(error).__name__}: {' '.join(visible(str(error)).split())}"
            )
            return _error(_own_failure())
        finally:
            self._connections.waits(request.protocol)

    def _check(self, request: web.Request) -> None:
        """Raises a `RequestError` if the request is not authorized, or if the server is stopping."""
        if request.path == "/health":
            return
        if self._api_key:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            known = hmac.compare_digest(key.strip().encode("utf-8", "replace"), self._api_key)
            if not known or scheme.lower() != "bearer":
                raise RequestError(
                    "the Authorization header must be `Bearer KEY` with the key that the server was started with",
                    status=401, code="invalid_api_key",
                )  # fmt: skip
        elif not is_loopback(host_name(request.headers.get("Host", ""))):
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
                "POST /inference/v1/generate, POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /metrics and GET /health",
                status=error.status, code="not_found" if error.status == 404 else "method_not_allowed",
            )  # fmt: skip
        return RequestError(error.reason, status=error.status)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._stopping or self._requests.ended.is_set():
            raise stopping()
        return _json({"status": "ok", "weights_version": self._requests.version})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._counts.exposition(self._requests.load()).encode(), headers=headers)

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
        limits, content = self._limits, await read_body(request)
        self._connections.works(request.protocol)
        # Parsing runs in a thread, because tokenizing a prompt of several megabytes must not delay other requests.
        asked = await asyncio.to_thread(read, content, limits)
        request[_ANSWERS] = [answer := kind(asked, limits)]
        async with sampled(self._requests, asked) as arriving:
            if asked.stream and isinstance(answer, ChatAnswer):
                return await _streamed(request, answer, arriving)
            async for new in arriving:
                answer.add(new)
        return _json(answer.whole())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """Answers a request to `/v1/completions`, whose prompts are scored or sampled in one batch."""
        content = await read_body(request)
        self._connections.works(request.protocol)
        asked = await asyncio.to_thread(read_completions, content, self._limits)
        wholes, answers = [], [CompletionAnswer(checked, self._limits) for checked in asked]
        request[_ANSWERS] = answers
        async with AsyncExitStack() as submitted:
            batch = [
                await submitted.enter_async_context(sampled(self._requests, checked)) for checked in asked
            ]
            for answer, arriving in zip(answers, batch, strict=True):
                async for new in arriving:
                    answer.add(new)
                # It runs in a thread because it decodes each token.
                wholes.append(await asyncio.to_thread(answer.whole))
        choices = enumerate(choice for whole in wholes for choice in whole["choices"])
        usage = {name: sum(whole["usage"][name] for whole in wholes) for name in wholes[0]["usage"]}
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        fields = {"choices": [choice | {"index": index} for index, choice in choices], "usage": usage}
        version = min(whole["weights_version"] for whole in wholes)
        return _json({**head, "model": self._limits.model, **fields, "weights_version": version})


def _own_failure() -> RequestError:
    text = "the server failed to answer this request; its log has the reason"
    return RequestError(text, status=500, code="internal_error")


def _malformed(reason: str, status: int = 400) -> RequestError:
    text = f"the request is not valid HTTP: {visible(reason)!s:.200}"
    return RequestError(text, status=status, code="malformed")


def _named(request: web.Request) -> str:
    """Returns the method and the path of a request, which cannot break a line."""
    return " ".join(visible(f"{request.method} {request.raw_path[:200]}").split())


async def _streamed(
    request: web.Request, answer: ChatAnswer, arriving: AsyncIterator[NewTokens]
) -> web.StreamResponse:
    """Streams an answer as server-sent events, one per chunk."""
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)

    async def send(*chunks: Mapping[str, Any] | msgspec.Raw | None) -> None:
        events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks if chunk is not None]
        if not events:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await response.write(b"".join(events))
        except TimeoutError as error:
            raise ConnectionResetError(f"the client received nothing for {PATIENCE_S} s") from error

    try:
        await send(*answer.first_chunks())
        async for new in arriving:
            await send(answer.chunk(new))
        await send(answer.usage_chunk())
    except RequestError as error:  # sent as an event, because the HTTP status has already been sent
        await send(error_object(error))
        return response
    await send(msgspec.Raw(b"[DONE]"))
    await response.write_eof()
    return response


def _json(content: Mapping[str, Any], **options: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json", **options)


def _error(error: RequestError) -> web.Response:
    headers = {"Retry-After": "1"} if error.code == "queue_full" else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(error_object(error), status=error.status, headers=headers)


def _ending(new: NewTokens) -> dict[str, Any]:
    return {"finish_reason": new.finish_reason, "spans": [span._asdict() for span in new.spans]}
