"""Serves a report to a browser on this machine and keeps it up to date, for `dapo-jax report RUN --watch`.

Runs are read when the page requests data, at most once a second, and each file of rollouts or evaluations only once. Only programs on
this machine can connect. The host name in each request is checked, so that no other website can read the data through DNS rebinding.
"""

import base64
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import PathLike
from typing import Any

from dapo_jax.config import ConfigError
from dapo_jax.report.build import check_count, page_data, title_of
from dapo_jax.report.evaluations import Evaluations
from dapo_jax.report.page import packed_of, page_of
from dapo_jax.report.rollouts import Rollouts
from dapo_jax.report.runs import has_begun, named, read_run
from dapo_jax.storage import AnyPath

HOST = "127.0.0.1"

LOOK_S = 1.0
"""Minimum number of seconds between two checks for new files, and the approximate maximum time that a check spends reading them."""

_PACKED = re.compile(r"/packed/(chunk|eval)-(\d{1,3})-(\d{1,9})")


class _Followed:
    """One watched run, and the layouts of its rollouts and evaluations so far."""

    def __init__(self, folder: AnyPath, name: str) -> None:
        self.run = read_run(folder, name, early=True)
        self._rollouts, self._evaluations = Rollouts(self.run), Evaluations(by_score=self.run.by_score)
        self._done: set[AnyPath] = set()
        self.rollouts, self.evaluations = self._rollouts.laid(logged=0), self._evaluations.laid(logged=0)

    def look(self, until: float) -> bool:
        """Loads new metrics, rollouts and evaluations, and stops at about time `until`. Returns whether there was anything new."""
        before = self.run
        self.run = read_run(before.folder, before.name, early=True)
        rollouts = self._read(self.run.logged, self._rollouts.add, until)
        evaluations = self._read(self.run.evaluations, self._evaluations.add, until)
        if rollouts or self.run.logged != before.logged:
            self.rollouts = self._rollouts.laid(logged=len(self.run.logged))
        if evaluations or self.run.evaluations != before.evaluations:
            self.evaluations = self._evaluations.laid(logged=len(self.run.evaluations))
        return rollouts or evaluations or self.run != before

    def _read(self, files: Sequence[AnyPath], read: Callable[[AnyPath], None], until: float) -> bool:
        """Passes new files to `read` until time `until`, but at least one file, so that slow storage does not prevent progress."""
        new = [file for file in files if file not in self._done]
        for index, file in enumerate(new):
            if index and time.monotonic() > until:
                break
            read(file)
            self._done.add(file)
        return bool(new)


class Watched:
    """The runs that a served page shows. All methods are thread-safe."""

    def __init__(self, folders: Sequence[str | PathLike[str]]) -> None:
        """Loads the runs for the first time. Raises the same errors as `report`."""
        check_count(len(folders))
        self._lock = threading.Lock()
        self._runs = [_Followed(folder, name) for name, folder in named(folders).items()]
        self.names = [followed.run.name for followed in self._runs]
        self._version, self._looked, self._error = 1, -LOOK_S, ""

    def state(self) -> bytes:
        """Returns {version, error} as JSON. The version increases when `data` or the error changes."""
        with self._lock:
            self._look()
            return json.dumps({"version": self._version, "error": self._error}).encode()

    def data(self) -> bytes:
        """Returns the data for the page's scripts as JSON, with the indices of rollouts and evaluations."""
        with self._lock:
            indices = {name: base64.b64encode(content).decode() for name, content in self._indices().items()}
            return json.dumps({**self._data(), "packed": indices}, allow_nan=False).encode()

    def page(self) -> bytes:
        """Returns the current page. The browser requests the texts of rollouts and evaluations on demand."""
        with self._lock:
            self._look()
            page = page_of(title_of(self.names), self._data(), self._indices(), watching=True)
            return page.encode("utf-8")

    def packed(self, kind: str, run: int, number: int) -> bytes | None:
        """Returns a chunk of a run's rollouts (kind `chunk`) or evaluations (kind `eval`), or None if it does not exist."""
        with self._lock:
            if run >= len(self._runs):
                return None
            laid = self._runs[run].rollouts if kind == "chunk" else self._runs[run].evaluations
            return laid.chunks[number] if number < len(laid.chunks) else None

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        try:
            changed = [followed.look(now + LOOK_S) for followed in self._runs]
            error = ""
        except ConfigError as damaged:
            changed, error = [], str(damaged)
        if any(changed) or error != self._error:
            self._version += 1
        self._looked, self._error = time.monotonic(), error

    def _data(self) -> dict[str, Any]:
        data, *_ = page_data([(run.run, run.rollouts, run.evaluations) for run in self._runs])
        return {**data, "watched": self._version}

    def _indices(self) -> dict[str, bytes]:
        laid = [(replace(run.rollouts, chunks=()), replace(run.evaluations, chunks=())) for run in self._runs]
        return packed_of(laid)


class _Server(ThreadingHTTPServer):
    """An HTTP server on this machine's loopback address."""

    daemon_threads = True

    def __init__(self, port: int, watched: Watched) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"port: cannot listen at {HOST}:{port} ({error.strerror or error}); choose another port, or leave it out for a free one"
            ) from error
        self.watched = watched
        shown = "" if self.server_port == 80 else f":{self.server_port}"  # browsers omit port 80
        self.hosts = {f"{name}{shown}" for name in (HOST, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores browsers that disconnect; prints other errors."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"dapo-jax report: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for the page, its state, its data and its chunks. It does not serve files."""

    server_version, sys_version = "dapo_jax", ""
    timeout = 60
    """Seconds without data after which a connection is closed."""

    def do_GET(self) -> None:
        """Answers requests for the page and its data."""
        server = self.server
        assert isinstance(server, _Server)
        watched = server.watched
        json_type = "application/json"
        routes = {
            "/": ("text/html; charset=utf-8", watched.page),
            "/state": (json_type, watched.state),
            "/data": (json_type, watched.data),
        }
        if self.headers.get("Host") not in server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"use 127.0.0.1 or localhost\n")
        elif self.path in routes:
            kind, content_of = routes[self.path]
            self._answer(HTTPStatus.OK, kind, content_of())
        elif (match := _PACKED.fullmatch(self.path)) and (
            content := watched.packed(match[1], int(match[2]), int(match[3]))
        ):
            self._answer(HTTPStatus.OK, "application/gzip", content)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing, because an open page sends a request every two seconds."""


def watch(*runs: str | PathLike[str], port: int = 0) -> None:
    """Serves a report of active runs at `port` of 127.0.0.1 (0: any free port) and keeps it up to date until it is interrupted (Ctrl-C).

    Waits until all runs have begun, and prints the page's address. Raises the same errors as `report`, and ConfigError if the port is not available.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port: found {port}, needs 0 (any free port) to 65535")
    check_count(len(runs))
    try:
        if late := [run for run in runs if not has_begun(run)]:
            names = ", ".join(map(str, late))
            print(f"waiting for runs to begin: {names}; press Ctrl-C to stop", file=sys.stderr, flush=True)
        while not all(map(has_begun, late)):
            time.sleep(LOOK_S)
        watched = Watched(runs)
        with _Server(port, watched) as server:
            address = f"http://{HOST}:{server.server_port}/ (accessible from this machine only; press Ctrl-C to stop)"
            print(f"watching {', '.join(watched.names)}: {address}", flush=True)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("\nno longer watching", flush=True)
