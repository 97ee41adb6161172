"""How orbax is told which checkpoints stay, and to be quiet."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
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
    """Keeps orbax's log out of the terminal: remarks about its own defaults, and tracebacks of errors that it raises too."""
    logger = logging.getLogger("absl")
    if _from_orbax not in logger.filters:
        logger.addFilter(_from_orbax)
        sys.excepthook = _but_for_closed_loops(sys.excepthook)


def _from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname.replace("\\", "/")


def _but_for_closed_loops(shown: Callable[..., Any]) -> Callable[..., Any]:
    """`shown` for all but what the writes that outlive a failed save say: orbax has closed the loop they report to.

    Only C code calls `sys.excepthook` outside the main thread; for threads of Python's own there is another hook.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not closed or threading.current_thread() is threading.main_thread():
            shown(kind, error, trace)

    return hook
