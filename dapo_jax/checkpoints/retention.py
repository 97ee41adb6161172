"""Which checkpoints orbax keeps, and filters for its log."""

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from orbax.checkpoint.checkpoint_managers import PreservationPolicy


class Keeping(PreservationPolicy):
    """Keeps the last `count` checkpoints and the best one."""

    def __init__(self, count: int, best: Callable[[], tuple[int, float] | None]) -> None:
        self._count, self._best = count, best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns one flag per checkpoint; each has a `step` (orbax's protocols cannot be checked at run time)."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self._count :], *(self._best() or ())[:1]}
        return [step in kept for step in steps]


def quiet_orbax() -> None:
    """Keeps orbax's log out of the terminal: remarks about its defaults, and tracebacks of errors that it also raises.

    After a save has failed, its other writes fail too: asyncio logs their errors, and tensorstore cannot report to a closed event
    loop. These messages are dropped as well.
    """
    absl = logging.getLogger("absl")
    if _not_from_orbax not in absl.filters:
        absl.addFilter(_not_from_orbax)
        logging.getLogger("asyncio").addFilter(_not_raised_in_orbax)
        sys.unraisablehook = _without_closed_loops(sys.unraisablehook)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname


def _not_raised_in_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    return not any("/orbax/" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))


def _without_closed_loops(shown: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Wraps an unraisable hook so that it ignores errors about a closed loop raised from C code, which have no object."""

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not closed or unraisable.object is not None:
            shown(unraisable)

    return hook
