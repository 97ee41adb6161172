"""Stops a run on request: interrupts some phases, completes others, and saves a checkpoint.

During startup, sampling, grading and evaluation, a signal immediately raises `StoppedError` in the main thread. Within `Stop.held`,
while weights change or files are written, the signal is deferred. Only the command line installs signal handlers, with
`stopped_by_signals`, because a notebook has its own.
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
"""Exit status of a stopped run that can be resumed (EX_TEMPFAIL in sysexits.h). Launch scripts resume such a run."""

GRACE_S = 25.0
"""Number of seconds a run may take to stop. Kubernetes and Cloud TPU kill a process 30 s after they send it a termination signal."""

REPEATED_S = 0.5
"""A signal that is repeated within this many seconds does not count as a second request."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)

HANGUP = signal.SIGHUP
"""The signal that a closing terminal sends. The system and the shell may both send it, so it never counts as a second request."""

_WAKE = signal.SIGUSR1
"""The signal that other threads send to wake the main thread."""

_Item = TypeVar("_Item")


class StoppedError(BaseException):
    """Raised when the run is stopped. Like KeyboardInterrupt, it does not derive from Exception, so `except Exception` does not catch it."""


def first_reason(reasons: Mapping[int, str], process: int) -> str:
    """Returns the reason for stopping a run with several processes, or an empty string if no process was asked to stop.

    `reasons` maps each process to its `Stop.reason`, which may already name the process where the stop was requested. The returned reason
    names this process if it is not `process`, the process that reports it.
    """
    for index, reason in sorted(reasons.items()):
        if reason:
            return reason if index == process or "(process " in reason else f"{reason} (process {index})"
    return ""


class Stop:
    """Stores whether a stop was requested, and whether the run may be interrupted now."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        """`wake` is called in other threads. It must make the main thread call `note`."""
        self.reason = ""
        """The source of the request, for example SIGTERM. Empty if no stop was requested."""
        self.failed = ""
        """The failure of another process, which ends this run. Empty if no process has failed."""
        self.grace_s = GRACE_S
        self._held = False
        self._wake = wake

    def ask(self, reason: str) -> None:
        """Requests a stop without interrupting the run. The first reason is kept."""
        self.reason = self.reason or reason

    def tell(self, reason: str) -> None:
        """Requests a stop from another thread. The request does not count as a signal, so the next signal is still the first."""
        if not self.reason:
            self.ask(reason)
            if self._wake is not None:
                self._wake()

    def fail(self, why: str) -> None:
        """Interrupts the main thread because another process failed, so no checkpoint can be saved. Other threads call this method."""
        self.failed = why
        (self._wake or _thread.interrupt_main)()

    def check(self) -> None:
        """Raises StoppedError if a stop was requested, or KeyboardInterrupt if another process failed."""
        if self.failed:
            raise KeyboardInterrupt(self.failed)
        if self.reason:
            raise StoppedError(self.reason)

    def note(self, reason: str) -> None:
        """Calls `ask`, and then `check` unless the run is inside `held`. Signal handlers call it in the main thread."""
        self.ask(reason)
        if not self._held:
            self.check()

    @contextlib.contextmanager
    def held(self, held: bool = True) -> Iterator[None]:
        """Defers signals within the block, or lets them raise StoppedError if `held` is False."""
        before, self._held = self._held, held
        try:
            yield
        finally:
            self._held = before

    @contextlib.contextmanager
    def abandonable(self) -> Iterator[None]:
        """Lets signals raise StoppedError within the block, including signals deferred so far."""
        with self.held(False):
            self.check()
            yield

    def watched(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yields the items. The run may be interrupted while it waits for an item, but not while it uses the item."""
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
    """Stops the run on SIGTERM, SIGINT or SIGHUP. A second SIGTERM or SIGINT, or the end of the grace period, ends the process.

    A separate thread ends the process, because signal handlers do not run while the main thread is in compiled code. SIGHUP is ignored if
    it was ignored at the start (nohup). It is also ignored after a stop, so that a second SIGHUP does not change the exit status. `end` ends the process: it is called
    with an exit status and the reason, and must not return.
    """
    main, hung_up = threading.get_ident(), False
    stop = Stop(lambda: signal.pthread_kill(main, _WAKE))

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal hung_up
        if number == HANGUP and hung_up:
            return  # the run is already stopping, and must not be interrupted while it saves
        hung_up = hung_up or number == HANGUP
        stop.note("" if number == _WAKE else signal.Signals(number).name)

    seen, awake = socket.socketpair()
    awake.setblocking(False)
    former = signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
    hangup = () if signal.getsignal(HANGUP) is signal.SIG_IGN else (HANGUP,)
    before = {number: signal.signal(number, handle) for number in (*SIGNALS, *hangup, _WAKE)}
    listener = threading.Thread(target=_listen, args=(stop, seen, end), name="signals", daemon=True)
    listener.start()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            late = stop.reason and number in (HANGUP, _WAKE)
            signal.signal(number, signal.SIG_IGN if late else handler)
        signal.set_wakeup_fd(former)
        awake.close()  # ends the listener
        listener.join()
        seen.close()


def _listen(stop: Stop, seen: socket.socket, end: Callable[[int, str], None]) -> None:
    """Handles the signal numbers that arrive at the socket until its other end is closed."""
    limit: float | None = None
    signals, first, came = 0, 0, 0.0
    while True:
        left = None if limit is None else max(0.0, limit - time.monotonic())
        if not select.select([seen], [], [], left)[0]:
            late = f"did not stop within {stop.grace_s:g} s of {stop.reason}"
            end(STOPPED, f"{late}: the process ends now, and the last saved checkpoint is kept")
            return
        if not (received := seen.recv(1)):
            return
        number = received[0]
        if number not in (*SIGNALS, HANGUP) and not (number == _WAKE and stop.reason):
            continue
        name = stop.reason if number == _WAKE else signal.Signals(number).name
        stop.ask(name)  # the handler runs later if the main thread is in compiled code
        # Some programs, such as `timeout`, send the same signal both to the process and to its group.
        repeated = number == first and time.monotonic() - came < REPEATED_S
        first, came = (first, came) if first else (number, time.monotonic())
        signals += number in SIGNALS and not repeated
        if signals > 1:
            end(128 + number, f"a second signal ({name}): ended immediately")
            return
        if limit is None:
            limit = time.monotonic() + stop.grace_s
            ends = f"ends within {stop.grace_s:g} s and saves the last complete step, if there is one"
            asked = f"was asked to stop by {name}: {ends}; a second signal ends it immediately"
            with contextlib.suppress(OSError):  # standard error may be closed
                print(asked, file=sys.stderr, flush=True)
