"""The parent process's handle for a worker process. The worker accepts calls and may answer them in any order.

Calls and answers are JSON objects, one per line, on two pipes. `dapo_jax.workers.inside` runs at the other end.

Existing process pools are not suitable. `concurrent.futures` and loky cannot kill a single worker. Pebble pickles its calls, runs the
user's main program again in each worker, and does not limit memory.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal

START_S = 120.0
"""Maximum time in seconds for loading the user's code. Importing a large package may take long on a busy machine."""

MOST_BYTES = 1 << 25
"""Maximum size of an answer in bytes. A longer line means that some other code has written to the pipe."""

_ENDING_S = 2.0
"""Time in seconds that a process has to exit after its pipe is closed. Then it is killed."""


class EndedError(Exception):
    """Raised if a worker ends before it has answered a call."""

    def __init__(self, lost: Literal["died", "timeout"], reason: str, *, elsewhere: bool = False) -> None:
        super().__init__(reason)
        self.lost: Literal["died", "timeout"] = lost
        self.elsewhere = elsewhere
        """Whether the worker's machine was lost, so that no call is to blame."""


class Worker:
    """A handle for one worker process. One thread starts it and receives its answers, and another sends calls to it."""

    together = 1
    """Maximum number of calls that a pool should ask at once, because a message is slow compared with a call."""

    def __init__(self, load: str, setup: Mapping[str, Any], *, memory_mb: int) -> None:
        """Starts the process without waiting for it. The process calls `load`, a `module:function`, with `setup`, a JSON object.

        After loading, it may allocate `memory_mb` megabytes.
        """
        self.ready: Future[dict[str, Any]] = _running_future()
        """The first answer, sent once the user's code is loaded. Raises ValueError if loading fails, or EndedError if the process ends."""
        self.ended: EndedError | None = None
        """Why the process ended, or None while it runs."""
        self.answered = 0
        """Number of calls that the worker has answered."""
        self._asked: dict[int, Future[dict[str, Any]]] = {0: self.ready}
        self._numbers = itertools.count(1)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        arguments = {"load": load, "setup": setup, "memory_mb": memory_mb}
        self._thread = threading.Thread(target=self._run, args=(arguments,), daemon=True, name="worker")
        self._thread.start()

    def ask(self, call: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Sends a call and returns a future for its answer. The future raises EndedError if the worker ends first."""
        answer = _running_future()
        with self._lock:
            number = next(self._numbers)
            if self.ended is not None:
                answer.set_exception(self.ended)
                return answer
            self._asked[number] = answer
        self._lines.put(json.dumps({**call, "id": number}).encode() + b"\n")
        return answer

    def end(self, why: EndedError) -> None:
        """Kills the process and all its children. Pending calls raise `why`, unless the process had already ended."""
        with self._lock:
            if self.ended is not None:
                return
            if not self.ready.done() and not why.elsewhere:
                remedy = "a file or module must load in a separate process, without waiting and without ending the process"
                why = EndedError(why.lost, f"its worker did not start: {why}; {remedy}")
            self.ended = why
            asked, self._asked = self._asked, {}
            if self._process is not None:
                _kill(self._process)
        self._lines.put(None)
        for answer in asked.values():
            answer.set_exception(why)

    def join(self) -> None:
        """Waits at most a few seconds for the process to end."""
        self._thread.join(2 * _ENDING_S)

    def _run(self, arguments: Mapping[str, Any]) -> None:
        """Starts the process and receives its answers. On Linux, the process ends when this thread ends."""
        try:
            process = _started(arguments)
        except OSError as error:
            self.end(EndedError("died", f"cannot start the worker process: {error}"))
            return
        with self._lock:
            self._process = process
            if self.ended is not None:
                _kill(process)
        sending = threading.Thread(target=self._send, args=(process,), daemon=True)
        sending.start()
        late = EndedError("timeout", f"it was not ready within {START_S:g} s")
        timer = threading.Timer(START_S, self.end, [late])
        timer.daemon = True
        timer.start()
        self.ready.add_done_callback(lambda _: timer.cancel())
        end = self._take_answers(process)
        self.end(EndedError("died", f"the worker process died ({end})"))
        _kill(process)
        process.wait()
        sending.join(_ENDING_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _take_answers(self, process: subprocess.Popen[bytes]) -> str:
        """Receives answers until there are no more, and returns how the process ended."""
        assert process.stdout is not None
        line = b""
        try:
            while (line := process.stdout.readline(MOST_BYTES)).endswith(b"\n"):
                answer = json.loads(line)
                with self._lock:
                    future = self._asked.pop(answer["id"], None)
                if future is self.ready and "failed" in answer:
                    future.set_exception(ValueError(answer["failed"]))
                elif future is not None:
                    self.answered += future is not self.ready
                    future.set_result(answer)
        except (ValueError, TypeError, KeyError, RecursionError):
            return f"it sent {line[:200]!r}, which is not an answer"
        if line:
            return f"it sent {MOST_BYTES:,} bytes without a line end"
        try:
            code = process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe and kept running"
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended
            while (line := self._lines.get()) is not None:
                process.stdin.write(line)
                process.stdin.flush()


def _running_future() -> Future[Any]:
    """Returns a future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _started(arguments: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    # The worker searches for modules in the same folders as this process. But while it loads its own modules, the standard library comes first, and
    # the current folder is left out (-P). Otherwise a user's token.py would replace the standard module.
    path = [folder for folder in sys.path if isinstance(folder, str)]
    library = [sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED")]
    variables = {
        "PYTHONPATH": os.pathsep.join(folder for folder in [*library, *path] if folder),
        "MALLOC_ARENA_MAX": "2",  # otherwise each thread reserves address space, which counts towards the memory limit
    }
    arguments = {**arguments, "parent": os.getpid(), "path": path}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "dapo_jax.workers.inside", json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
        start_new_session=True,  # so that children of the user's code can be killed with the worker
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
