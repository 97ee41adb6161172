"""The process of a worker, from both sides: how it is started and ends, what bounds its memory, and the lines on the two pipes to it.

It is started as `python -m MODULE SETUP`, reads a call a line and answers with lines, over pipes that none of the user's code and nothing it starts gets hold of by
accident: standard input is empty, and what is printed goes to the standard error. It ends with the process that started it, whatever it is doing then.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENDING_S = 1.0
"""Seconds that a worker that has closed its pipe is given to end by itself, before it is killed."""

_STATM = Path("/proc/self/statm")
_PR_SET_PDEATHSIG = 1


class WorkerProcess:
    """A process and its two pipes, as the one that started it sees them."""

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        *,
        most_bytes: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process. On Linux it ends with the thread that starts it, so that one has to outlast it.

        Args:
            module: run as a program, with what `setup_of_worker` gives there.
            setup: names and values that JSON has.
            most_bytes: the longest line that it may send.
            environment: variables beside those of this process.
        """
        # It finds what this process finds, the package and the user's modules, and in the same order once it has loaded its own. Till
        # then the standard library comes first (and with -P no current folder): a user's token.py would end it.
        path = [place for place in sys.path if isinstance(place, str)]
        library = [sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED")]
        first = os.pathsep.join(place for place in [*library, *path] if place)
        told = json.dumps({**setup, "parent": os.getpid(), "path": path})
        # A session of its own: what the user's code started goes with it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, told],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {}), "PYTHONPATH": first},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._calls, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._calls, False)
        self._most_bytes = most_bytes
        self._read = bytearray()

    @property
    def has_ended(self) -> bool:
        """True once the process is no more."""
        return self._process.poll() is not None

    def send(self, line: bytes, deadline: float = math.inf) -> None:
        """Sends a line.

        Raises:
            TimeoutError: it was not taken until `deadline`, of `time.monotonic`.
            BrokenPipeError: nobody reads any more.
        """
        left = memoryview(line)
        while left:
            if not _ready(self._calls, select.POLLOUT, deadline):
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._calls, left) :]

    def line(self, deadline: float = math.inf) -> bytes:
        """The next line that it sends; the time holds while data arrive, too.

        Raises:
            TimeoutError: there was none until `deadline`, of `time.monotonic`.
            EOFError: the pipe was closed.
            ValueError: it is longer than may be.
        """
        searched = 0
        while (end := self._read.find(b"\n", searched)) < 0:
            searched = len(self._read)
            if searched > self._most_bytes:
                raise ValueError(f"more than {self._most_bytes:,} bytes without an end")
            if not _ready(self._answers, select.POLLIN, deadline):
                raise TimeoutError
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise EOFError
            self._read += part
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line

    def ending(self) -> str:
        """The way in which a process ended whose pipe was closed, in words."""
        try:
            code = self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return "its pipe closed, the process going on"
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        """Ends the process and all that it started; the pipes stay open for who reads them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends the process and all that it started, and closes the pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _ready(descriptor: int, event: int, deadline: float) -> bool:
    """True once the descriptor can be read or written, or has ended; False if the deadline passes first."""
    poll = select.poll()  # select.select takes no descriptor above 1,023
    poll.register(descriptor, event)
    left = deadline - time.monotonic()
    return left > 0 and bool(poll.poll(None if left == math.inf else 1000 * left))


def private_pipes() -> tuple[int, int]:
    """In the worker: descriptors of calls and answers that are passed on to no program; the standard streams no longer lead to them."""
    # Ctrl-C reaches every process of a terminal; the one that was started by hand decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(2)
    except OSError:  # the trainer was started without a standard error
        os.dup2(nowhere, 2)
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    os.close(nowhere)
    return calls, answers


def setup_of_worker() -> dict[str, Any]:
    """In the worker: the setup, once the process ends with the one that started it, and finds the user's modules where that one finds them, and at last in the current folder."""
    setup = json.loads(sys.argv[1])
    _end_with(setup["parent"])
    sys.path[:] = [*setup["path"], ""]
    return setup


def _end_with(parent: int) -> None:
    """Has this process end when `parent`, which started it, is gone: user's code that is busy would otherwise go on for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_end_when_gone, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def _end_when_gone(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def bound_memory(memory_mb: int) -> None:
    """In the worker: no more address space than the process has now and `memory_mb` beyond; asking for more is a MemoryError."""
    if not _STATM.exists():
        return  # not Linux: the time limit alone bounds a call
    pages = int(_STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def say(answers: int, call: int, message: Mapping[str, Any]) -> None:
    """In the worker: answers a call, by its number."""
    left = memoryview(json.dumps({"id": call, **message}).encode() + b"\n")
    while left:
        left = left[os.write(answers, left) :]
