"""The connections of the HTTP server: how many there may be, and how long each may take to send a request.

A connection is *waiting* until its request is there as a whole, and again once it is answered. The server needs no key to hold such a connection, so
these make room: the one that has waited longest is closed when there are too many. A connection whose request is being answered stays.
"""

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from dapo_jax.terminal import visible

_HEAD_S = 10.0
"""Seconds that a client may take to send the first line and the headers."""
_IDLE_S = 75.0
"""Seconds that a client may take to fetch an answer, or to send the next request."""
_LOOK_S = 0.5
"""Seconds between two looks for connections that have waited too long."""
_OWN_DESCRIPTORS = 48
"""Descriptors that stay free for files of the process: checkpoints, caches, libraries."""
_TURNS = 5
"""Turns of the event loop in which whole requests that have arrived are read, before a connection that waits is closed."""
_LEAST = 8
_BACKLOG = 1024
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)

Answer = Callable[[int, str], web.Response]
"""The answer to a request that is not HTTP, of a status and a reason."""


class Connections:
    """Accepts connections for an aiohttp server, up to a number of them."""

    def __init__(self, most: int, answer: Answer, say: Callable[[str], None]) -> None:
        """Accepts nothing yet.

        Args:
            most: connections at once, or fewer if the process may not open as many files.
            answer: to a request that is not HTTP.
            say: logs what fails in aiohttp itself.
        """
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/dev/fd")) - _OWN_DESCRIPTORS
        self.most = max(_LEAST, min(most, free))
        """Connections at once."""
        self.answer, self.say = answer, say
        self._waiting: dict[_Handler, float] = {}
        """Until when each may wait; in the order in which they began to."""
        self._working: set[_Handler] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: socket.socket | None = None

    def listen(self, host: str, port: int, server: web.Server) -> int:
        """Accepts connections at an address from now on, and returns the port.

        Raises:
            OSError: nothing can listen there.
        """
        [family, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._tasks = [
            asyncio.create_task(self._accept(self._listener, server)),
            asyncio.create_task(self._close_late()),
        ]
        return self._listener.getsockname()[1]

    async def close(self) -> None:
        """Accepts no more connections; those that are there stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def waits(self, handler: Any, seconds: float) -> None:
        """Notes that a connection waits for its client from now on, for at most so long."""
        self._working.discard(handler)
        self._waiting.pop(handler, None)
        if handler.transport is not None:
            self._waiting[handler] = asyncio.get_running_loop().time() + seconds

    def works(self, handler: Any) -> None:
        """Notes that the whole request of a connection is there."""
        if self._waiting.pop(handler, None) is not None:
            self._working.add(handler)

    def idles(self, handler: Any) -> None:
        """Notes that the request of a connection is answered."""
        self.waits(handler, _IDLE_S)

    def gone(self, handler: Any) -> None:
        """Forgets a connection."""
        self._waiting.pop(handler, None)
        self._working.discard(handler)

    @property
    def _full(self) -> bool:
        return len(self._waiting) + len(self._working) >= self.most

    async def _accept(self, listener: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:  # the client is gone, or the process has no descriptor left
                self._make_room()
                await asyncio.sleep(_LOOK_S / 10)
                continue
            if self._full:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
            if self._full and not self._make_room():
                with suppress(OSError):
                    accepted.send(_REFUSAL)
                    accepted.recv(1 << 16)  # a request that stays unread would take the refusal back
                accepted.close()
                continue
            with suppress(OSError):
                await loop.connect_accepted_socket(lambda: _Handler(self, server, loop), accepted)

    def _make_room(self) -> bool:
        """Closes the connection that has waited longest; False if none waits."""
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        self._abort(oldest)
        return True

    async def _close_late(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            for handler in [each for each, until in self._waiting.items() if until < loop.time()]:
                self._abort(handler)

    def _abort(self, handler: "_Handler") -> None:
        self.gone(handler)
        if isinstance(handler.transport, asyncio.WriteTransport):
            handler.transport.abort()


class _Handler(web.RequestHandler):
    """The connection of a client."""

    __slots__ = ("_connections",)

    def __init__(self, connections: Connections, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        # The server's own look at connections without a request comes first.
        super().__init__(server, loop=loop, auto_decompress=False, keepalive_timeout=2 * _IDLE_S)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.waits(self, _HEAD_S)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.gone(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that is not HTTP; nothing is logged of a client that has left."""
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the client has left")
        if status >= 500:
            self.log_exception("a request failed", exc_info=exc)
        response = self._connections.answer(status, message or "")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs one line, without a traceback."""
        self._connections.say(visible(f"the HTTP server: {args[0]}: {kw.get('exc_info')!r:.200}"))
