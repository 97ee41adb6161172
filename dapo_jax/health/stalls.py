"""Ends a run that makes no progress, and reports the activity of every thread and process.

A run reports its progress with `Watch.note`, for example after a prompt, a sampling round, a group or an update. A thread ends the run
if the last report is too old. A process that waits for others counts as stalled only if the others make no progress either.
"""

import faulthandler
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FRAMES = 8
"""Number of innermost calls to report per thread."""

_POLL_S = 1.0
_BACK_UP_S = 60.0
"""If no Python thread can run, the process is ended this many seconds after the time limit."""


@dataclass(frozen=True)
class _Doing:
    """The activity of a process. `count` is its number of reports, and `since` is the time at which the watching process received the last report."""

    count: int
    what: str
    for_others: bool
    since: float
    stalled: bool = False

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.since


class Watch:
    """Context manager that watches one process of a run for stalls."""

    def __init__(
        self,
        timeout_s: int | float,
        *,
        end: Callable[[int, str], Any],
        broadcast: Callable[[str], None] = lambda text: None,
        received: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """Prepares the watch.

        Args:
            timeout_s: seconds without progress after which the run is ended. 0 means that there is no limit.
            end: ends the run. It is called with an exit status and the reason.
            broadcast: sends this process's activity to the other processes.
            received: returns the last broadcast of every other process, by process index.
        """
        self._timeout_s, self._end, self._broadcast, self._received = timeout_s, end, broadcast, received
        self._now = _Doing(0, "starting", False, time.monotonic())
        self._others: dict[int, _Doing] = {}
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def note(self, what: str, *, for_others: bool = False) -> None:
        """Reports progress and the next activity, such as "reading prompts". Set `for_others` if the process will wait for other processes."""
        self._now = _Doing(self._now.count + 1, what, for_others, time.monotonic())

    def phase(self, name: str, done: int | None, total: int | None) -> None:
        """Reports that `done` of `total` units of a phase are complete. A phase without units passes None for both."""
        self.note(name if done is None else f"{name}, {done} of {total} done")

    def __enter__(self) -> "Watch":
        self.note("starting")
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        reported, poll = False, min(_POLL_S, self._timeout_s / 4)
        try:
            while not self._left.wait(poll):
                self._back_up()
                now = self._now
                others_progress = any(other.idle_s <= self._timeout_s for other in self._others.values())
                stalled = now.idle_s > self._timeout_s and not (now.for_others and others_progress)
                self._broadcast(json.dumps([now.count, now.what, now.for_others, stalled]))
                self._receive()
                if stalled:
                    self._print_report(now)
                    if self._others:
                        time.sleep(3 * poll)  # gives the other processes time to report before they end too
                    self._end(
                        1,
                        f"stalled: no progress for {now.idle_s:.0f} s while {now.what}. A report of all threads is above; if the run "
                        f"only needs more time, raise stall_timeout_s (now {self._timeout_s:g}; 0: no limit)",
                    )
                    return
                if not reported and any(other.stalled for other in self._others.values()):
                    reported = True
                    self._print_report(now)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _back_up(self) -> None:
        """Postpones the time at which faulthandler ends the process. Unlike a Python thread, faulthandler does not need the GIL."""
        if sys.__stderr__ is not None:
            with suppress(ValueError, OSError):  # a stream without a file
                limit = self._timeout_s + _BACK_UP_S
                faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)

    def _receive(self) -> None:
        """Updates the activities of other processes. All times are from this process's clock, because host clocks differ."""
        for index, text in self._received().items():
            count, what, for_others, stalled = json.loads(text)
            known = self._others.get(index)
            since = known.since if known is not None and known.count == count else time.monotonic()
            self._others[index] = _Doing(count, what, for_others, since, stalled)

    def _print_report(self, now: _Doing) -> None:
        """Prints the activities of all processes, and the innermost calls of each thread in this process."""
        lines = [f"no progress for {now.idle_s:.0f} s; this process: {now.what}"]
        for index, other in sorted(self._others.items()):
            lines.append(f"process {index}: {other.what}, for {other.idle_s:.0f} s")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines.append(f"thread {names.get(ident, ident)}:")
                for call in traceback.extract_stack(frame)[-FRAMES:]:
                    lines.append(f"    {Path(call.filename).name}:{call.lineno} {call.name}: {call.line}")
        print("\n".join(lines), file=sys.stderr, flush=True)


def interrupt(_: int, why: str) -> None:
    """Ends a run inside another program, such as a notebook: prints the reason and raises KeyboardInterrupt in the main thread."""
    print(why, file=sys.stderr, flush=True)
    # Sends a real signal, because `_thread.interrupt_main` does not wake a thread that sleeps or waits.
    main = threading.main_thread().ident
    assert main is not None, "it has been started"
    signal.pthread_kill(main, signal.SIGINT)
