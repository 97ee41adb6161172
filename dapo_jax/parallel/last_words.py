"""The message about a process that is ended because another one is gone, or that ends without a word of its own: killed, or crashed.

JAX ends a process whose first process is gone in C++, in a thread of its own, where no handler of Python's runs; the hook that
jaxlib 0.10 has for it (`missed_heartbeat_callback`) fails with std::bad_cast before it calls a function of Python's. So a child
process is told all the while what there is to say. It keeps a connection to the first process, and says within milliseconds that it
has broken off. Standard error goes through it, unless it is a terminal, so that its own words come before those with which JAX
ends the process. It also says the last once the pipe between parent and child ends without a farewell.

A file of its own: it runs in a process of its own, which imports nothing of the library.
"""

import json
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

OLD_S = 5.0
"""If the last news of the parent are older than this many seconds, the first process did not answer it."""

FIRST = "process 0, through which all hear of each other,"

_LEAVING, _FAREWELL = "leaving", "farewell"

_GONE, _DRAINED = b"gone\n", b"drained\n"
"""Lines by which the child tells its parent that the first process is gone, and that all that was on its way to standard error is there."""

_ENDS = re.compile(
    rb"^[EF]\d{4} [^\n]*\] (Use error polling to propagate the following error|Polled an error from coordination service|Terminating process because the JAX distributed service)",
    re.MULTILINE,
)
"""The lines that JAX logs before it aborts a process, as those of its C++ log begin."""

_KILLED = "it was killed or it crashed; the run's other processes end too"

_LONGEST = 4096
"""Bytes of a line of JAX's, before which the beginning of another is forgotten."""

_QUIET_S = 0.2
"""If nothing has come for so many seconds, nothing more is expected of what was written before."""

_DRAINING_S = 1.0
"""The longest wait for what was written before the end, however much other processes go on to write."""


class LastWords:
    """The child process. Nothing fails if it cannot be started, or has ended."""

    def __init__(
        self, *, index: int, count: int, address: str, first_gone: Callable[[], None] | None = None
    ) -> None:
        """Speaks for process `index` of `count`, whose first one answers at `address`, HOST:PORT.

        `first_gone` is called, in a thread, once it has been said that the first process is gone.
        """
        self._child: subprocess.Popen[bytes] | None = None
        self._first_gone = first_gone
        self._stderr: int | None = None
        """The descriptor of what standard error was before."""
        self._lock = threading.Lock()
        self._unsent, self._ended, self._drained = b"", False, threading.Event()
        with suppress(OSError):
            # A terminal stays one: what is shown there depends on it. With the first process of a container all others are killed, this child
            # before it has passed on the last lines.
            through = None if os.isatty(2) or os.getpid() == 1 else os.pipe()
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    __file__,
                    str(index),
                    str(count),
                    address,
                    *(str(end) for end in (through or ())[:1]),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # no lock that another thread could hold when the process forks
                pass_fds=(through or ())[:1],
                start_new_session=True,  # what ends the process and all of its group does not end this one
            )
            os.set_blocking(self._news_to(self._child), False)
            threading.Thread(target=self._hear, name="last words", daemon=True).start()
            if through is not None:
                self._stderr = os.dup(2)
                os.dup2(through[1], 2)
                for end in through:
                    os.close(end)
        os.register_at_fork(after_in_child=self._forked)

    def tell(self, *, silent: dict[int, float], way_on: str) -> None:
        """Tells what is known now.

        Args:
            silent: other process -> seconds for which nothing was heard of it.
            way_on: from where the run can go on, and how.
        """
        self._send([silent, way_on])

    def others_leave(self) -> None:
        """Tells the child that the first process may end from here on, so that its end is not reported."""
        self._send(_LEAVING)

    def farewell(self, *, wait: bool = True) -> None:
        """Says that this process ends in order: standard error goes directly again, and the child passes on what is left of it. With `wait`,
        waits for that, for 2 s at most."""
        self._ended = True
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        self._restore()
        self._send(_FAREWELL)
        self._close()
        if wait and self._child is not None:
            self._drained.wait(timeout=2.0)

    def _forked(self) -> None:
        """Closes the pipes in a forked process: the child would not see the end of the parent while one is open."""
        self._lock = threading.Lock()  # another thread may have held it
        self._restore()
        self._close()

    def _restore(self) -> None:
        """Standard error goes again where it went before."""
        with self._lock:
            before, self._stderr = self._stderr, None
        if before is not None:
            os.dup2(before, 2)
            os.close(before)

    def _hear(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._child.stdout:
                if line == _GONE and self._first_gone is not None:
                    self._first_gone()
        self._drained.set()
        if not self._ended and self._stderr is not None:
            self._restore()
            print(
                "the process through which standard error went has ended (killed?); it goes directly from here on, and if another process of "
                "the run is killed, JAX's own messages come first",
                file=sys.stderr,
            )

    def _send(self, news: Any) -> None:
        """Sends news, or what is left of those before; where the child does not read, since nobody reads what it writes, news are lost."""
        if self._child is None or self._child.stdin is None:
            return
        with suppress(OSError, ValueError):
            line = self._unsent or json.dumps(news).encode() + b"\n"
            self._unsent = line[os.write(self._news_to(self._child), line) :]

    def _close(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError, ValueError):
                self._child.stdin.close()

    @staticmethod
    def _news_to(child: "subprocess.Popen[bytes]") -> int:
        assert child.stdin is not None
        return child.stdin.fileno()


def gone(silent: dict[int, float]) -> str:
    """Which processes are gone, as far as one of the others knows.

    >>> gone({1: 12.3, 4: 12.9})
    'process 1 has not been heard of for 12 s, process 4 has not been heard of for 13 s'
    """
    return ", ".join(
        f"process {index} has not been heard of for {seconds:.0f} s"
        for index, seconds in sorted(silent.items())
    )


class _Child:
    """The other end of the pipe."""

    def __init__(self, index: int, count: int, address: str, through: int | None) -> None:
        """`through` is where the parent's standard error comes in; None: it does not."""
        self._index, self._address, self._through = index, address, through
        self._name = f"process {index} of {count}"
        self._news: tuple[dict[int, float], str] | None = None
        self._heard = time.monotonic()
        self._first: socket.socket | None = None
        self._since = 0.0
        self._first_gone = False
        self._said, self._line = "", b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        if through is not None:
            self._selector.register(through, selectors.EVENT_READ)
        if index:  # the first process says itself how it ends
            with suppress(OSError, ValueError):
                self._watch()

    def run(self) -> None:
        """Hears until there is a farewell, or the pipe ends; then it says the last."""
        rest = b""
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            if 0 in ready:
                if not (read := os.read(0, 1 << 16)):
                    break
                *lines, rest = (rest + read).split(b"\n")
                if any(self._take(json.loads(line)) for line in lines):
                    self._drain()
                    self._serve_the_others()
                    return
            elif self._first is not None and self._first.fileno() in ready:
                self._look()
            elif self._through in ready:
                self._pass_on()
        self._drain()
        if self._said:
            self._write(self._said)  # again, below all that JAX had to say
        elif self._news is not None:
            cause = self._cause()
            self._say(
                f"has ended without a word of its own: {f'ended by JAX, since {cause}' if cause else _KILLED}"
            )
        self._serve_the_others()

    def _take(self, news: Any) -> bool:
        """True if that was a farewell."""
        if news == _LEAVING:
            self._unwatch()
        elif news != _FAREWELL:
            self._heard = time.monotonic()
            self._news = {int(process): seconds for process, seconds in news[0].items()}, news[1]
        return news == _FAREWELL

    def _watch(self) -> None:
        self._first = self._connection()
        self._since = time.monotonic()
        self._first.setblocking(False)
        self._selector.register(self._first, selectors.EVENT_READ)

    def _unwatch(self) -> None:
        if self._first is not None:
            self._selector.unregister(self._first)
            self._first.close()
            self._first = None

    def _connection(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=3.0)

    def _look(self) -> None:
        """Whether the first process is gone, or has only closed a connection on which nothing came for a while."""
        try:
            if self._first is not None and self._first.recv(1 << 16):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._unwatch()
        if time.monotonic() - self._since < 1.0 and self._answers():
            return  # it keeps no connection for long, so there is nothing to see in its end
        try:
            self._watch()
        except ConnectionError:
            self._first_gone = True
            self._say_why()
            with suppress(OSError):
                os.write(1, _GONE)
        except (OSError, ValueError):
            pass  # the network is away, which says nothing of the process

    def _answers(self) -> bool:
        with suppress(OSError, ValueError), self._connection():
            return True
        return False

    def _pass_on(self) -> bool:
        """Passes on what came for standard error, behind this process's own words if it is the beginning of the end; True if something came."""
        assert self._through is not None
        if not (read := os.read(self._through, 1 << 16)):
            self._selector.unregister(self._through)
            self._through = None
            return False
        # A line may come in two parts.
        self._line = (self._line + read)[-_LONGEST:]
        if _ENDS.search(self._line):
            end = time.monotonic() + _QUIET_S
            while self._first is not None and (left := end - time.monotonic()) > 0:
                if select.select([self._first], [], [], left)[0]:
                    self._look()
            self._say_why()
        # What nobody can read any more is lost.
        with suppress(OSError):
            while read:
                try:
                    read = read[os.write(2, read) :]
                except BlockingIOError:
                    select.select([], [2], [])
        return True

    def _drain(self) -> None:
        """Passes on what was written before the end. Others may keep the pipe open, such as a grader's process, and write on."""
        end = time.monotonic() + _DRAINING_S
        while (
            self._through is not None
            and time.monotonic() < end
            and select.select([self._through], [], [], _QUIET_S)[0]
        ):
            self._pass_on()
        with suppress(OSError):
            os.write(1, _DRAINED)

    def _serve_the_others(self) -> None:
        """Passes on what processes write that outlive the parent, to their end."""
        while self._through is not None:
            self._pass_on()

    def _cause(self) -> str:
        """Why JAX ends the process, as far as that is known."""
        silent, age_s = {} if self._news is None else self._news[0], time.monotonic() - self._heard
        if silent:  # of which JAX may have ended the first process, too
            return f"{gone(silent)}: it was killed, or its machine is gone"
        if self._first_gone:
            return f"{FIRST} is gone (nothing answers at {self._address}): it was killed, or it crashed"
        if self._index and age_s > OLD_S:
            return f"{FIRST} did not answer for {age_s:.0f} s"
        if self._index and not self._answers():
            return f"{FIRST} is gone (nothing answers at {self._address})"
        return ""

    def _say_why(self) -> None:
        """Says why the process ends, once."""
        if not self._said:
            self._say(f"ends: {self._cause() or 'JAX ends it, for what it says below'}")

    def _say(self, what: str) -> None:
        way_on = "" if self._news is None else f" {self._news[1]}"
        self._said = f"{self._name} {what}.{way_on}"
        self._write(self._said)

    def _write(self, line: str) -> None:
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _Child(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if sys.argv[4:] else None).run()
