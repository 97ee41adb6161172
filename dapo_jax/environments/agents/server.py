"""The HTTP server of agents. It runs next to them, on the event loop of their environment, and listens on a loopback address only. Needs the `http` extra."""

import asyncio
import hmac
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from dapo_jax.environments.agents.chat import ChatRequest
from dapo_jax.environments.agents.episode import AgentEpisode, Asked, episode_over
from dapo_jax.terminal import visible
from dapo_jax.text.chat_requests import json_of
from dapo_jax.text.conversations import MOST_CHARACTERS
from dapo_jax.text.http import PATIENCE_S, RequestError, error_object, host_name, is_loopback, read_body

_ALIVE_S = 15.0
"""Interval in seconds between the comments that keep a waiting stream open."""
_MOST_BYTES = 6 * MOST_CHARACTERS + (1 << 20)
"""Maximum size of a body in bytes. The longest conversation fits if all of its characters are written as \\u escapes."""
_BACKLOG = 1024


class AgentServer:
    """Answers the agents of all episodes. Each episode has its own key."""

    def __init__(self, name: str, stop: Sequence[str]) -> None:
        """`name` is the environment's name in messages, and `stop` has the stop strings of the run."""
        self._name, self._stop, self._secret = name, stop, secrets.token_bytes(32)
        self._episodes: dict[str, AgentEpisode] = {}
        """The open episodes by key."""
        self._opened, self._late = 0, 0
        self._noted = frozenset[str]()
        self._keeping: asyncio.Task[None] | None = None
        self.url = ""
        """The base URL for OpenAI's clients."""

    async def start(self) -> None:
        """Starts to listen. The server ends with the event loop."""
        app = web.Application(middlewares=[self._guard], client_max_size=_MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        # If a client disconnects, aiohttp cancels the request's handler.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

        async def keep() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()

        self._keeping = asyncio.create_task(keep())

    def key(self) -> str:
        """Returns the key of a new episode: a number and 128 random bits. They are a signature of the number, so the server knows the keys of ended episodes."""
        self._opened += 1
        return self._signed(str(self._opened))

    def _signed(self, number: str) -> str:
        return f"{number}-{hmac.digest(self._secret, number.encode(), 'sha256').hex()[:32]}"

    def open(self, key: str, episode: AgentEpisode) -> None:
        """Accepts requests with a key for an episode."""
        self._episodes[key] = episode

    def close(self, key: str) -> int:
        """Refuses further requests with a key. Returns the number of requests since the last call that came after the end of their episodes."""
        self._episodes.pop(key, None)
        late, self._late = self._late, 0
        return late

    def episode(self, key: str) -> AgentEpisode:
        """Returns the episode of a key. Raises RequestError if the episode is over, or has never begun."""
        if (episode := self._episodes.get(key)) is None:
            self._late += 1
            raise episode_over()
        return episode

    def _asking(self, request: web.Request) -> tuple[AgentEpisode, bool]:
        """Returns the episode of the request's key, and whether its answer is trained. Raises RequestError if the key is wrong, or the episode is over.

        An agent that serves several episodes with one client has the key in the header X-Session-ID. The key may end with `.` and a name. If the name
        begins with `frozen`, the answer stays out of the loss.
        """
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        for given in (bearer if scheme.lower() == "bearer" else "", request.headers.get("X-Session-ID", "")):
            key, _, name = given.strip().partition(".")
            signed = self._signed(key.partition("-")[0]).encode()
            if hmac.compare_digest(key.encode("utf-8", "replace"), signed):
                return self.episode(key), not name.startswith("frozen")
        text = "the Authorization header must be `Bearer KEY` with the key of an episode"
        raise RequestError(text, status=401, code="invalid_api_key")

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        """Converts every error to a response in OpenAI's format. Checks the Host header, because a web page could send requests to a loopback address."""
        try:
            if not is_loopback(host_name(request.headers.get("Host", ""))):
                text = f"the Host header is {request.headers.get('Host', '')[:80]!r}; it must be a loopback address"
                raise RequestError(text, status=403, code="invalid_host")
            return await handler(request)
        except RequestError as error:
            return _json(error_object(error), error.status)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {_MOST_BYTES:,} bytes: shorten it"
            return _json(error_object(RequestError(text, code="body_too_large")), 413)
        except web.HTTPException as error:
            asked = f"{visible(request.method[:20])} {visible(request.path[:80])}"
            text = f"{asked} does not exist; the server has POST /v1/chat/completions, POST /v1/reward and GET /v1/models"
            return _json(error_object(RequestError(text, code="not_found")), error.status)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._asking(request)
        return _json(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "dapo_jax"}]}
        )

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        episode, _ = self._asking(request)
        episode.post(json_of(await read_body(request)))
        return _json({"accepted": True})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Passes a request to its episode, and sends the answer when the policy has sampled it."""
        episode, trained = self._asking(request)
        asked = ChatRequest(await read_body(request), self._stop)
        for field in sorted(asked.overridden - self._noted):
            text = f"environment {self._name}: requests set {field}, which the settings of the run replace"
            print(text, file=sys.stderr, flush=True)
        self._noted |= asked.overridden
        retried = request.headers.get("x-stainless-retry-count", "0") != "0"
        waiting = episode.ask(asked, retried=retried, trained=trained)
        with waiting.connection():
            response = await (_streamed if asked.body.stream else _whole)(request, waiting)
            waiting.delivered = True
        return response


async def _whole(request: web.Request, waiting: Asked) -> web.StreamResponse:
    """Sends the answer as one object."""
    response = _json((await asyncio.shield(waiting.answer)).whole())
    await response.prepare(request)
    async with asyncio.timeout(PATIENCE_S):
        await response.write_eof()
    return response


async def _streamed(request: web.Request, waiting: Asked) -> web.StreamResponse:
    """Sends the answer as server-sent events. A comment in regular intervals keeps the connection open while the policy is sampled."""
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    while not (await asyncio.wait([waiting.answer], timeout=_ALIVE_S))[0]:
        await response.prepare(request)
        await response.write(b": the policy has not answered yet\n\n")
    try:
        events = waiting.answer.result().chunks()
    except RequestError as error:
        if not response.prepared:
            raise
        events = [error_object(error)]
    await response.prepare(request)
    lines = [b"data: " + line + b"\n\n" for line in (*map(msgspec.json.encode, events), b"[DONE]")]
    async with asyncio.timeout(PATIENCE_S):
        await response.write(b"".join(lines))
        await response.write_eof()
    return response


def _json(content: object, status: int = 200) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, content_type="application/json", status=status)
