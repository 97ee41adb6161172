"""The retention of checkpoints, in orbax's words: which stay, and that it is quiet about it.

A file of its own: what orbax is told is apart from what checkpoints are.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from orbax.checkpoint.checkpoint_managers import PreservationPolicy


class Keeping(PreservationPolicy):
    """The last `count` checkpoints stay, and the best one."""

    def __init__(self, count: int, best: Callable[[], int | None]) -> None:
        self._count, self._best = count, best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One flag a checkpoint; each has a `step` (orbax's protocols cannot be checked at run time)."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self._count :], self._best()}
        return [step in kept for step in steps]


def quiet_orbax() -> None:
    """Keeps orbax's log out of the terminal: remarks about its own defaults, and tracebacks of errors that it raises too.

    Of a save that fails, other writes go on and fail too. What they say is left out as well: asyncio logs errors that
    nobody waits for any more, and tensorstore cannot report to an event loop that is closed.
    """
    absl = logging.getLogger("absl")
    if _not_from_orbax not in absl.filters:
        absl.addFilter(_not_from_orbax)
        logging.getLogger("asyncio").addFilter(_not_raised_in_orbax)
        sys.unraisablehook = _but_for_closed_loops(sys.unraisablehook)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return not _is_orbax(record.pathname)


def _not_raised_in_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    return not any(_is_orbax(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace))


def _is_orbax(path: str) -> bool:
    return "/orbax/" in path.replace("\\", "/")


def _but_for_closed_loops(shown: Callable[[Any], Any]) -> Callable[[Any], None]:
    """`shown` for all errors nobody can catch but those of C code, which bear no object, about a closed loop."""

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not closed or unraisable.object is not None:
            shown(unraisable)

    return hook
