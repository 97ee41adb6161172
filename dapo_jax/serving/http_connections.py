"""Limits the number of connections to the HTTP server, and the time that a client may take to send a request.

A connection is *waiting* until a whole request has arrived, and again after the answer has been sent. At the limit, a new connection replaces the connection that
has waited longest, because clients without an API key can open connections too. Connections whose requests are being answered stay open.
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
"""Maximum number of seconds for a client to send the request line and the headers."""
_IDLE_S = 75.0
"""Maximum number of seconds for a client to receive an answer, or to send the next request."""
_LOOK_S = 0.5
"""Seconds between checks for connections that have waited too long."""
_OWN_DESCRIPTORS = 48
"""File descriptors reserved for the rest of the process: checkpoints, caches and libraries."""
_TURNS = 5
"""Number of event-loop iterations before a waiting connection is closed to make room, so that requests that have already arrived are read first."""
_LEAST = 8
_BACKLOG = 1024
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class Connections:
    """Accepts at most `most` connections for an aiohttp server, or fewer if the process may not open that many files.

    `answer` builds the response to a malformed HTTP request from a status and a reason, and `say` logs errors that aiohttp reports.
    """

    def __init__(
        self, most: int, answer: Callable[[int, str], web.Response], say: Callable[[str], None]
    ) -> None:
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/dev/fd")) - _OWN_DESCRIPTORS
        self.most = max(_LEAST, min(most, free))
        self.answer, self.say = answer, say
        self._waiting: dict[_ClientConnection, float] = {}
        """Maps each waiting connection to its deadline. The connection that has waited longest comes first."""
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: socket.socket | None = None

    def listen(self, host: str, port: int, server: web.Server) -> int:
        """Starts to accept connections at an address, and returns the port. Raises OSError if the address cannot be bound."""
        [family, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._tasks = [
            asyncio.create_task(self._accept(self._listener, server)),
            asyncio.create_task(self._close_late()),
        ]
        return self._listener.getsockname()[1]

    async def close(self) -> None:
        """Stops accepting connections. Open connections stay open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def waits(self, handler: Any, seconds: float = _IDLE_S) -> None:
        """Marks a connection as waiting for its client, for at most `seconds`."""
        self.works(handler)
        if handler.transport is not None:
            self._waiting[handler] = asyncio.get_running_loop().time() + seconds

    def works(self, handler: Any) -> None:
        """Marks a connection as no longer waiting, because a whole request has arrived or the connection is closed."""
        self._waiting.pop(handler, None)

    async def _accept(self, listener: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:  # the client has disconnected, or no file descriptor is free
                self._make_room()
                await asyncio.sleep(_LOOK_S / 10)
                continue
            if len(server.connections) >= self.most:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
            if len(server.connections) >= self.most and not self._make_room():
                with suppress(OSError):
                    accepted.send(_REFUSAL)
                    accepted.recv(1 << 16)  # closing a socket with unread input would discard the refusal
                accepted.close()
                continue
            with suppress(OSError):
                await loop.connect_accepted_socket(lambda: _ClientConnection(self, server, loop), accepted)

    def _make_room(self) -> bool:
        """Closes the connection that has waited longest. Returns False if no connection is waiting."""
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        self._abort(oldest)
        return True

    async def _close_late(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            for handler in [late for late, until in self._waiting.items() if until < loop.time()]:
                self._abort(handler)

    def _abort(self, handler: "_ClientConnection") -> None:
        self.works(handler)
        if isinstance(handler.transport, asyncio.WriteTransport):
            handler.transport.abort()


class _ClientConnection(web.RequestHandler):
    """The connection to one client."""

    __slots__ = ("_connections",)

    def __init__(self, connections: Connections, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        # aiohttp's timeout is longer than `_IDLE_S`, so `Connections` is the first to close an idle connection.
        super().__init__(server, loop=loop, auto_decompress=False, keepalive_timeout=2 * _IDLE_S)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.waits(self, _HEAD_S)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.works(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that is not valid HTTP. Logs nothing if the client has disconnected."""
        if request.writer.output_size > 0 or isinstance(exc, ConnectionError):
            raise ConnectionError("the client has disconnected")
        if status >= 500:
            self.log_exception("a request failed", exc_info=exc)
        response = self._connections.answer(status, message or "")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs one line, without a traceback."""
        self._connections.say(visible(f"the HTTP server: {args[0]}: {kw.get('exc_info')!r:.200}"))
