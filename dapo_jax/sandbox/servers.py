"""A sandbox with long-lived servers (`server.py`). Each server runs one program at a time."""

import asyncio
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, TypeVar

from dapo_jax.sandbox.protocol import Outcome, Program, SandboxError
from dapo_jax.sandbox.server import MEMORY, SYNTAX

_Result = TypeVar("_Result")
_KNOWN = Program(source="print(int(input()) + 1)", stdin=b"41")


class ServerError(RuntimeError):
    """A server ended. The message contains its last words."""


class NoCoreError(ServerError):
    """A program had no core for most of its wall time, which it cannot cause itself."""


class Server:
    """A server, and the program that it runs."""

    def __init__(self, command: Sequence[str], **popen: Any) -> None:
        """Starts the server. It ends with the calling thread, or when the other end of its socket is closed."""
        self._words = tempfile.TemporaryFile()  # noqa: SIM115
        self._files = list[int]()
        self._sent: asyncio.StreamWriter | None = None
        self._start(command, {"stdout": subprocess.DEVNULL, "stderr": self._words, **popen})

    def _start(self, command: Sequence[str], popen: dict[str, Any]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), **popen)

    async def begin(self, program: Program, mode: str) -> None:
        """Starts a program, see `Runner` for the modes."""
        self._program, self.outcome = program, None
        self._files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "source")]
        for file, data in ((0, program.stdin), (3, program.source.encode("utf-8", "surrogatepass"))):
            os.pwrite(self._files[file], data, 0)
        ours, theirs = socket.socketpair()
        with theirs:
            limits = asdict(program.limits) | {"wall_s": program.limits.wall_s}
            header = json.dumps({"mode": mode, "limits": limits}).encode()
            streams, source = self._files[:3], self._files[3]
            self._send(header, [*streams, theirs.fileno(), source])
        if mode == "script":
            ours.close()
            return
        self._received, self._sent = await asyncio.open_connection(sock=ours, limit=program.limits.output)

    async def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the program. The limits of a call apply from now on."""
        self._send(b"m")
        if self._sent:
            with suppress(OSError):  # the program has ended
                self._sent.write(json.dumps(message).encode() + b"\n")
                await self._sent.drain()

    async def said(self) -> Any:
        """Waits for the program's next message, and returns it as decoded JSON, or None if the program ended. Until the next `tell`, its clock stops."""
        line = b""
        with suppress(OSError):
            try:
                line = await self._received.readline()
            except ValueError:  # it is too long
                self.outcome = replace(await self.ended(stop=True), ended="output")
        if not line.endswith(b"\n"):
            await self.ended()
            return None
        self._send(b"p")
        return message_of(line)

    @property
    def printed(self) -> tuple[bytes, bytes]:
        """The output and the error output of a program that has not ended, each at most one byte longer than the limit."""
        out, error = (os.pread(file, self._program.limits.output + 1, 0) for file in self._files[1:3])
        return out, error

    async def ended(self, *, stop: bool = False) -> Outcome:
        """Waits for the end of the program, or ends it if `stop` is set. Returns its outcome.

        Raises ServerError if the server ended, or NoCoreError if the program had no core.
        """
        if self.outcome is None:
            if stop:
                self._send(b"k")
            data = b""
            with suppress(OSError):
                data = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
            if not data:
                raise ServerError(self._last_words())
            self.outcome = self._outcome(**json.loads(data))
        return self.outcome

    def close(self) -> None:
        """Ends the server and its program."""
        self._release()
        self._socket.close()
        self._words.close()
        self._end()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _last_words(self) -> str:
        self._words.seek(0)
        return self._words.read()[-1000:].decode(errors="replace").strip() or "the server ended"

    def _outcome(self, ended: str, status: int, cpu_s: float) -> Outcome:
        if ended == "wall":
            raise NoCoreError("a program had no core for most of its time; use fewer sandbox.slots")
        printed = self.printed
        self._release()
        return outcome_of(self._program, ended, status, cpu_s, *printed)

    def _release(self) -> None:
        while self._files:
            os.close(self._files.pop())
        if self._sent:
            self._sent.close()
            self._sent = None

    def _send(self, data: bytes, files: Sequence[int] = ()) -> None:
        with suppress(OSError):  # the server has ended, which `ended` notices
            socket.send_fds(self._socket, [data], files)


def message_of(line: bytes) -> Any:
    """Decodes a message of a program, which may have written it itself."""
    try:
        message = json.loads(line)
        return {} if message is None else message  # None is the end of a program
    except (ValueError, RecursionError):
        return {"raise": ["ValueError", "a message that is not JSON"]}


def outcome_of(program: Program, ended: str, status: int, cpu_s: float, out: bytes, error: bytes) -> Outcome:
    """Returns the outcome of a program. Its output may be longer than the limit."""
    most = program.limits.output
    if ended == "exit":
        ended = {SYNTAX: "syntax", MEMORY: "memory"}.get(status, "exit")
    if len(out) > most:
        ended = "output"
    return Outcome(ended=ended, status=status, cpu_s=cpu_s, stdout=out[:most], stderr=error[:most])


class ServerSandbox:
    """A sandbox with servers, which end with `close` or with this process. Its methods must be called on one event loop."""

    def __init__(self, start: Callable[[], Server], *, slots: int, remedy: str) -> None:
        """Starts nothing. At most `slots` programs run at once. `start` starts a server. The message of a SandboxError ends with `remedy`."""
        self.start, self.remedy = start, remedy
        self._slots, self._running, self.restarts = slots, asyncio.Semaphore(slots), 0
        self._free, self.waiting = list[Server](), dict[object, Server]()

    async def run(self, program: Program) -> Outcome:
        """Runs a script in a free slot. Raises SandboxError if the sandbox failed."""
        return await self.surely(lambda: self.script(program)) or Outcome(ended="server")

    async def surely(self, job: Callable[[], Awaitable[_Result]]) -> _Result | None:
        """Waits for a free slot and returns the result of a job, which is repeated once if a server ends. Returns None if a server ends again, although a known
        program does not end it.

        So a program cannot avoid a verdict by doing damage. Raises SandboxError if the known program fails, too, or the machine has no free cores.
        """
        async with self._running:
            for is_last in (False, True):
                try:
                    return await job()
                except (ServerError, OSError) as error:
                    self.restarts += 1
                    await self.check()
                    if is_last and isinstance(error, NoCoreError):
                        raise SandboxError(str(error)) from error
        return None

    async def check(self) -> None:
        """Runs a known program on a new server. Raises SandboxError if it fails."""
        while self._free:  # other servers may have ended, too
            self._free.pop().close()
        try:
            outcome = await self.script(_KNOWN)
            reason = "" if outcome.stdout == b"42\n" else f"a right program ended with {outcome}"
        except (ServerError, OSError) as error:
            reason = str(error)
        if reason:
            raise SandboxError(f"the sandbox failed: {reason}. {self.remedy}")

    async def script(self, program: Program) -> Outcome:
        """Runs a script as a part of a job, see `surely`. Raises ServerError if its server ends."""
        async with self.live(program, "script") as server:
            return await server.ended()

    @asynccontextmanager
    async def live(self, program: Program, mode: str, session: object = None) -> AsyncIterator[Server]:
        """Starts a program as a part of a job, see `surely`, and `Runner` for the modes. With a `session`, continues its program in `waiting`, if there is one,
        and lets a program that has not ended wait. At most four programs for each slot wait; then the first of them ends. Raises ServerError if its server ends."""
        waiting = self.waiting.pop(session, None)
        server = waiting or (self._free.pop() if self._free else self.start())
        try:
            if waiting is None:
                await server.begin(program, mode)
            yield server
            if session is None:
                await server.ended(stop=True)
        except BaseException:
            server.close()
            raise
        if server.outcome is None:
            self.waiting[session] = server
        else:
            self._free.append(server)
        if len(self.waiting) > 4 * self._slots:
            self.waiting.pop(next(iter(self.waiting))).close()

    def close(self) -> None:
        """Ends the servers that run no program, and the servers of sessions."""
        for server in (*self._free, *self.waiting.values()):
            server.close()
        self._free.clear()
        self.waiting.clear()
