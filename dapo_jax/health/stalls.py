"""A run that waits for ever: found by its lack of progress, and ended with a report of what every thread and process was doing.

Whatever makes progress says so (`Watch.note`): a prompt read, a look at the sampler, a group handed to its graders, an update. A
thread compares the time since with the limit. One process that waits for the others is no stall as long as one of these gets on.
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
"""Innermost calls of each thread that are reported."""

_POLL_S = 1.0
_BACK_UP_S = 60.0
"""How much longer it may take until a process in which no thread runs is ended."""


@dataclass(frozen=True)
class _Doing:
    """The occupation of a process, and since when this one knows of it."""

    count: int
    what: str
    for_others: bool
    since: float
    stalled: bool = False

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.since


class Watch:
    """Watches one process of a run. A context manager: it watches while the block lasts."""

    def __init__(
        self,
        timeout_s: int | float,
        *,
        end: Callable[[int, str], Any],
        broadcast: Callable[[str], None] = lambda text: None,
        received: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """Does nothing yet.

        Args:
            timeout_s: seconds without progress after which the run is ended; 0: never.
            end: called with an exit status and why.
            broadcast: tells the other processes what this one does.
            received: process -> what each of the others has broadcast last.
        """
        self._timeout_s, self._end, self._broadcast, self._received = timeout_s, end, broadcast, received
        self._now = _Doing(0, "starting", False, time.monotonic())
        self._others: dict[int, _Doing] = {}
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def note(self, what: str, *, for_others: bool = False) -> None:
        """There is progress, and this comes next; `for_others`: it ends once the other processes are as far."""
        self._now = _Doing(self._now.count + 1, what, for_others, time.monotonic())

    def phase(self, name: str, done: int | None, total: int | None) -> None:
        """`note` of a phase and how far it is, as `Progress` says it."""
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
                stalled = now.idle_s > self._timeout_s and not (now.for_others and self._others_get_on())
                self._broadcast_state(now, stalled=stalled)
                self._receive()
                if stalled:
                    _write(self._report(now))
                    if self._others:
                        time.sleep(3 * poll)  # they report too, before this one's end is theirs
                    self._end(1, self._message(now))
                    return
                if not reported and any(other.stalled for other in self._others.values()):
                    reported = True
                    _write(self._report(now))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _back_up(self) -> None:
        """Where a call holds Python's lock for ever no thread runs, this one included; faulthandler needs none."""
        if sys.__stderr__ is not None:
            with suppress(ValueError, OSError):  # one without a file
                limit = self._timeout_s + _BACK_UP_S
                faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)

    def _broadcast_state(self, now: _Doing, *, stalled: bool) -> None:
        self._broadcast(json.dumps([now.count, now.what, now.for_others, stalled]))

    def _receive(self) -> None:
        """Times are this process's: the clocks of hosts differ."""
        for index, text in self._received().items():
            count, what, for_others, stalled = json.loads(text)
            known = self._others.get(index)
            since = known.since if known is not None and known.count == count else time.monotonic()
            self._others[index] = _Doing(count, what, for_others, since, stalled)

    def _others_get_on(self) -> bool:
        return any(other.idle_s <= self._timeout_s for other in self._others.values())

    def _message(self, now: _Doing) -> str:
        return (
            f"stalled: no progress for {now.idle_s:.0f} s while {now.what}. What every thread was doing is written above; if it only needed "
            f"longer, raise stall_timeout_s (now {self._timeout_s:g}; 0: no limit)"
        )

    def _report(self, now: _Doing) -> str:
        """A report of what this process's threads do, and what the other processes do."""
        lines = [f"no progress for {now.idle_s:.0f} s; this process: {now.what}"]
        lines += [
            f"process {index}: {other.what}, for {other.idle_s:.0f} s"
            for index, other in sorted(self._others.items())
        ]
        return "\n".join([*lines, *_threads()]) + "\n"


def interrupt(_: int, why: str) -> None:
    """Ends a run in a process that is not its own, such as a notebook's: says why, and raises KeyboardInterrupt in its main thread."""
    _write(f"{why}\n")
    # A signal of the system's: of `_thread.interrupt_main` a thread that sleeps or waits would only learn afterwards.
    main = threading.main_thread().ident
    assert main is not None, "it has been started"
    signal.pthread_kill(main, signal.SIGINT)


def _threads() -> list[str]:
    """The innermost calls of every thread of Python's, the last one last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        lines.append(f"thread {names.get(ident, ident)}:")
        for call in traceback.extract_stack(frame)[-FRAMES:]:
            lines.append(f"    {Path(call.filename).name}:{call.lineno} {call.name}: {call.line}")
    return lines


def _write(report: str) -> None:
    sys.stderr.write(report)
    sys.stderr.flush()
