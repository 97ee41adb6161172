"""The message about a process that ends without a word of its own: killed, crashed, or ended by JAX because another one is gone.

JAX ends such a process in C++, in a thread of its own, where no handler of Python's runs; the hook that jaxlib 0.10 has for it
(`missed_heartbeat_callback`) fails with std::bad_cast before it calls a function of Python's. So a child process is told all the while
what there is to say, and says it once the pipe between them ends without a farewell. It runs this file alone, without the library.

A file of its own: it runs in a process of its own, which imports nothing of the library.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

OLD_S = 5.0
"""Older news than this mean that the first process did not answer this one."""


class LastWords:
    """The child process. Nothing fails if it cannot be started, or has ended."""

    def __init__(self, *, index: int, count: int, address: str) -> None:
        """Speaks for process `index` of `count`, whose first one answers at `address`, HOST:PORT."""
        self._child: subprocess.Popen[bytes] | None = None
        with suppress(OSError):
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(index), str(count), address],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # what ends the process and all of its group does not end this one
            )
        os.register_at_fork(after_in_child=self._close)  # or a forked process would keep the pipe open

    def tell(self, *, silent: dict[int, float], way_on: str) -> None:
        """Tells what is known now.

        Args:
            silent: other process -> seconds for which nothing was heard of it.
            way_on: from where the run can go on, and how.
        """
        self._send([silent, way_on])

    def farewell(self) -> None:
        """There is nothing to say: the process says itself how it ends."""
        self._send(None)
        self._close()
        if self._child is not None:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=2.0)

    def _send(self, news: Any) -> None:
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError, ValueError):
                self._child.stdin.write(json.dumps(news).encode() + b"\n")
                self._child.stdin.flush()

    def _close(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError, ValueError):
                self._child.stdin.close()


def gone(silent: dict[int, float]) -> str:
    """Which processes are gone, as far as one of the others knows.

    >>> gone({1: 12.3, 4: 12.9})
    'process 1 has not been heard of for 12 s, process 4 has not been heard of for 13 s'
    """
    return ", ".join(
        f"process {index} has not been heard of for {seconds:.0f} s"
        for index, seconds in sorted(silent.items())
    )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), timeout=3.0):
        return True
    return False


def _cause(index: int, address: str, silent: dict[int, float], age_s: float) -> str:
    if silent:
        return f"ended by JAX, since {gone(silent)}"
    if index and age_s > OLD_S:
        return f"ended by JAX, since process 0, through which all hear of each other, did not answer for {age_s:.0f} s"
    if index and not _answers(address):
        return f"ended by JAX, since process 0, through which all hear of each other, is gone (nothing answers at {address})"
    return "killed, or it crashed; the others end for want of it"


def main(index: int, count: int, address: str) -> None:
    """Reads news from standard input until it ends, and says the last to standard error, unless they were a farewell."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    news: Any = None
    heard = time.monotonic()
    for line in sys.stdin:
        news, heard = json.loads(line), time.monotonic()
    if news is None:
        return
    silent = {int(process): seconds for process, seconds in news[0].items()}
    cause = _cause(index, address, silent, time.monotonic() - heard)
    print(
        f"process {index} of {count} has ended without a word of its own: {cause}. {news[1]}", file=sys.stderr
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
