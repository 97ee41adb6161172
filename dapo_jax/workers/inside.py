"""The program that runs in a worker process. `Worker` starts it as `python -m dapo_jax.workers.inside ARGUMENTS`.

ARGUMENTS is a JSON object that specifies a load function as `module:function`. This function receives the worker's setup, loads the user's code, and returns
the first answer and a function `serve(calls, answer)`. `serve` answers the numbered calls until there are no more.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dapo_jax.terminal import lasting_streams

Answer = Callable[[int, Mapping[str, Any]], None]
"""Function `answer(number, content)`, which sends the answer to the call with this number."""
Serve = Callable[[Iterable[dict[str, Any]], Answer], None]
"""Function `serve(calls, answer)`, which answers calls until there are no more."""
Load = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], Serve]]
"""Function `load(setup)`, which returns the first answer and a `Serve` function. It raises ValueError if the user's code cannot be loaded."""

_STATM = Path("/proc/self/statm")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Loads the user's code, limits the memory, and answers calls until the pipe for calls is closed."""
    calls, answers = _private_pipes()
    arguments = json.loads(sys.argv[1])
    _end_with(arguments["parent"])
    sys.path[:] = [*arguments["path"], ""]
    worker = os.getpid()

    def answer(number: int, content: Mapping[str, Any]) -> None:
        if os.getpid() != worker:
            os._exit(0)  # the user's code has forked this process; only the worker itself answers
        left = memoryview(json.dumps({"id": number, **content}).encode() + b"\n")
        while left:
            left = left[os.write(answers, left) :]

    with lasting_streams():  # the user's code may print even if standard output is closed
        module, _, name = arguments["load"].partition(":")
        load: Load = getattr(importlib.import_module(module), name)
        try:
            first, serve = load(arguments["setup"])
        except ValueError as error:
            answer(0, {"failed": str(error)})
            return
        _limit_memory(arguments["memory_mb"])
        answer(0, first)
        with os.fdopen(calls, "rb") as lines:
            serve(map(json.loads, lines), answer)


def _private_pipes() -> tuple[int, int]:
    """Returns new descriptors for calls and answers, and redirects the standard streams, so that printed text does not mix with answers."""
    # Ctrl-C interrupts every process in a terminal, but only the main process decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(2)
    except OSError:  # the main process was started without standard error
        os.dup2(nowhere, 2)
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    os.close(nowhere)
    return calls, answers


def _end_with(parent: int) -> None:
    """Ensures that this process exits when the process `parent` exits, even while the user's code is running."""

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=wait, daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the code above ran
        os._exit(1)


def _limit_memory(memory_mb: int) -> None:
    """Limits the address space to its current size plus `memory_mb`. Allocating more raises MemoryError."""
    if not _STATM.exists():
        return  # not Linux: there is no memory limit, only a time limit
    pages = int(_STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
