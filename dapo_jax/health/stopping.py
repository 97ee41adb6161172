"""A run that is told to stop: what may be abandoned is, what must be whole is finished, and a checkpoint is left.

A signal raises `StoppedError` in the main thread at once, wherever a run may be cut short: while it starts, samples, grades and
evaluates. Within `Stop.held`, while weights change and files are written, it waits. The library installs no handler by itself
(a notebook has its own); the command does, by `stopped_by_signals`.
"""

import _thread
import contextlib
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import TypeVar

STOPPED = 75
"""Exit status of a run that was stopped and can be resumed (EX_TEMPFAIL of sysexits.h: try again); launch scripts do."""

GRACE_S = 25.0
"""How long a run may take to stop. Kubernetes and Cloud TPU kill 30 s after they have told."""

REPEATED_S = 0.5
"""Within so long the same signal again is no second one: nobody has thought again so soon."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)

HANGUP = signal.SIGHUP
"""The signal of a terminal that was closed. It may come from the system and from the shell at once, so it is never the second signal."""

_TOLD = signal.SIGUSR1
"""A thread that has heard of a stop elsewhere wakes the main thread by this signal."""


_Item = TypeVar("_Item")


class StoppedError(BaseException):
    """The run was told to stop. As KeyboardInterrupt it is no Exception: what catches those must not catch it."""


def first_reason(reasons: Mapping[int, str], process: int) -> str:
    """Who told a run of several processes to stop, as `process` says it; empty if nobody did.

    Args:
        reasons: process -> `Stop.reason` there, which names another process already if it was heard of from that one.
    """
    for index, reason in sorted(reasons.items()):
        if reason:
            return reason if index == process or "(process " in reason else f"{reason} (process {index})"
    return ""


class Stop:
    """Whether a run has been told to stop, and whether it may be cut short where it is."""

    def __init__(self) -> None:
        self.reason = ""
        """Who told it, such as SIGTERM; empty as long as nobody has."""
        self.failed = ""
        """Why the run ends although nobody told it to: another of its processes has failed."""
        self.grace_s = GRACE_S
        self._held = False
        self._wake: Callable[[], None] | None = None

    def ask(self, reason: str) -> None:
        """Tells the run to stop; only the first reason counts. Does not interrupt."""
        self.reason = self.reason or reason

    def tell(self, reason: str) -> None:
        """Tells the run to stop, from another thread. Unlike a signal it does not count: the next signal is still the first."""
        if not self.reason:
            self.ask(reason)
            if self._wake is not None:
                self._wake()

    def fail(self, why: str) -> None:
        """Interrupts the main thread, from another one: the run ends, and there is nobody to save a checkpoint with."""
        self.failed = why
        (self._wake or _thread.interrupt_main)()

    def woken_by(self, wake: Callable[[], None]) -> None:
        """`wake` has the main thread call `note`."""
        self._wake = wake

    def check(self) -> None:
        """Raises StoppedError if the run has been told to stop, KeyboardInterrupt if another process has failed."""
        if self.failed:
            raise KeyboardInterrupt(self.failed)
        if self.reason:
            raise StoppedError(self.reason)

    def note(self, reason: str) -> None:
        """`ask`, and `check` unless it is held: what a signal handler in the main thread does."""
        self.ask(reason)
        if not self._held:
            self.check()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, a signal is only noted."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @contextlib.contextmanager
    def abandonable(self) -> Iterator[None]:
        """Within, a signal raises StoppedError; so does one that was noted before."""
        before, self._held = self._held, False
        try:
            self.check()
            yield
        finally:
            self._held = before

    def watched(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items; where one is waited for is abandonable, where it is used is not."""
        iterator = iter(items)
        while True:
            with self.abandonable():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


@contextlib.contextmanager
def stopped_by_signals(end: Callable[[int, str], None]) -> Iterator[Stop]:
    """SIGTERM, SIGINT and SIGHUP stop the run within this block; a second SIGTERM or SIGINT, or the end of the time of grace, ends the
    process.

    After a stop SIGHUP stays ignored: a repeated one must not change the exit status while the interpreter shuts down.

    A thread sees to the latter two, since no handler runs while the main thread is in compiled code. SIGHUP stays ignored where it
    was when the program began: nohup asks for that.

    Args:
        end: called with an exit status and why; must not return.
    """
    stop = Stop()
    main = threading.get_ident()
    stop.woken_by(lambda: signal.pthread_kill(main, _TOLD))

    hung_up = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal hung_up
        if number == HANGUP and hung_up:
            return  # an exception now would interrupt the stop itself
        hung_up = hung_up or number == HANGUP
        stop.note("" if number == _TOLD else signal.Signals(number).name)

    seen, awake = socket.socketpair()
    awake.setblocking(False)
    former = signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
    hangup = () if signal.getsignal(HANGUP) is signal.SIG_IGN else (HANGUP,)
    before = {number: signal.signal(number, handle) for number in (*SIGNALS, *hangup, _TOLD)}
    listener = threading.Thread(target=_listen, args=(stop, seen, end), name="signals", daemon=True)
    listener.start()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            late = stop.reason and number in (HANGUP, _TOLD)
            signal.signal(number, signal.SIG_IGN if late else handler)
        signal.set_wakeup_fd(former)
        awake.close()  # which ends the listener
        listener.join()
        seen.close()


def _listen(stop: Stop, seen: socket.socket, end: Callable[[int, str], None]) -> None:
    """Reads the numbers of signals as they come, until the other end is closed."""
    limit: float | None = None
    signals, first, came = 0, 0, 0.0
    while True:
        left = None if limit is None else max(0.0, limit - time.monotonic())
        if not select.select([seen], [], [], left)[0]:
            end(
                STOPPED,
                f"did not stop within {stop.grace_s:g} s of {stop.reason}: ends with what was saved before",
            )
            return
        received = seen.recv(1)
        if not received:
            return
        number = received[0]
        if number not in (*SIGNALS, HANGUP) and not (number == _TOLD and stop.reason):
            continue
        name = stop.reason if number == _TOLD else signal.Signals(number).name
        stop.ask(name)  # the main thread may not come to it
        # `timeout`, among others, sends the same one to the process and to its group.
        repeated = number == first and time.monotonic() - came < REPEATED_S
        first, came = (first, came) if first else (number, time.monotonic())
        signals += number in SIGNALS and not repeated
        if signals > 1:
            end(128 + number, f"a second signal ({name}): ended at once")
            return
        if limit is None:
            limit = time.monotonic() + stop.grace_s
            with contextlib.suppress(
                OSError
            ):  # nobody may read it any more, and the time of grace is still to be kept
                print(
                    f"told to stop by {name}: ends within {stop.grace_s:g} s and saves the last whole step, if there is one; a second "
                    "signal ends it at once",
                    file=sys.stderr,
                    flush=True,
                )
