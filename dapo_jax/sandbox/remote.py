"""Programs on a service that speaks SandboxFusion's format (https://github.com/bytedance/SandboxFusion). It isolates programs, and limits elapsed time.

The service keeps no process. So a program that answers messages runs again from its start for each message, with all earlier messages.
"""

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from dapo_jax.sandbox import server
from dapo_jax.sandbox.protocol import Outcome, Program
from dapo_jax.sandbox.servers import Server, ServerError, message_of, outcome_of

_SERVER = Path(server.__file__).read_bytes()
_MODULE = "dapo_jax_server"
_MOST_BYTES = 4 * server.LARGEST_FILE * 4 // 3
"""Three files in base64, and what the service writes itself."""
_WAIT_S = 30.0
"""Time that the service may need in addition to the program."""


class RemoteServer(Server):
    """A program on the service."""

    def __init__(self, url: str) -> None:
        """Sends nothing. The service's address is `url`, without `/run_code`."""
        self._url = f"{url.rstrip('/')}/run_code"

    async def begin(self, program: Program, mode: str) -> None:
        """Stores a program, see `Runner` for the modes."""
        self._program, self._mode, self.outcome = program, mode, None
        self._messages, self._replies, self._taken = list[bytes](), list[bytes](), 0
        self._ran: Outcome | None = None

    async def tell(self, message: Mapping[str, Any]) -> None:
        """Stores a message to the program."""
        self._messages.append(json.dumps(message).encode() + b"\n")

    async def said(self) -> Any:
        """Runs the program. Returns its next message as decoded JSON, or None if it ended. Raises ServerError if the service failed."""
        self._ran = await self._run()
        line = b"".join(self._replies[self._taken : self._taken + 1])
        self._taken += 1
        if line.endswith(b"\n") and len(line) <= self._program.limits.output:
            return message_of(line)
        self.outcome = replace(self._ran, ended="output") if line else self._ran
        return None

    @property
    def printed(self) -> tuple[bytes, bytes]:
        """The output and the error output of the last run."""
        return (self._ran.stdout, self._ran.stderr) if self._ran else (b"", b"")

    async def ended(self, *, stop: bool = False) -> Outcome:
        """Runs the program, unless it has ended or `stop` is set. Returns its outcome. Raises ServerError if the service failed."""
        if self.outcome is None:
            self.outcome = Outcome(ended="stopped") if stop else await self._run()
        return self.outcome

    def close(self) -> None:
        """Does nothing, because nothing waits on the service."""

    async def _run(self) -> Outcome:
        limits = self._program.limits
        run_s = min(limits.cpu_s * max(1, len(self._messages)), limits.total_s) + limits.idle_s
        files = {
            f"{_MODULE}.py": _SERVER,
            "source": self._program.source.encode("utf-8", "surrogatepass"),
            "stdin": self._program.stdin,
            "messages": b"".join(self._messages),
        }
        request = {
            "code": f"import {_MODULE}\n{_MODULE}.alone({self._mode!r}, {limits.memory_mb})\n",
            "language": "python",
            "run_timeout": run_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {name: base64.b64encode(data).decode() for name, data in files.items()},
            "fetch_files": ["stdout", "stderr", "replies", "started"],
        }
        timeout_s = run_s + _WAIT_S
        try:
            answer = await asyncio.wait_for(asyncio.to_thread(self._post, request, timeout_s), timeout_s)
            if answer["status"] not in ("Success", "Failed"):
                raise ServerError(f"{answer['status']} {answer['message']}"[:1000])
            ran, written = answer["run_result"], answer["files"]
            out, error, replies, started = (
                base64.b64decode(written.get(name, "")) for name in request["fetch_files"]
            )
            if not started:
                raise ServerError(f"the program did not start: {ran!s:.500}")
            code, seconds = int(ran.get("return_code") or 0), float(ran.get("execution_time") or 0)
        except (
            OSError,
            HTTPException,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as failed:
            raise ServerError(f"{self._url}: {type(failed).__name__}: {failed!s:.500}") from failed
        self._replies = replies.splitlines(keepends=True)
        ended = "wall" if ran["status"] == "TimeLimitExceeded" else "signal" if code < 0 else "exit"
        return outcome_of(self._program, ended, abs(code), seconds, out, error)

    def _post(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        body, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
        with urlopen(Request(self._url, body, headers), timeout=timeout_s) as answer:
            return json.loads(answer.read(_MOST_BYTES))
