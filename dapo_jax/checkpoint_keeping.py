"""How orbax is told which checkpoints stay, and to be quiet."""

import logging
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
    """Keeps orbax's log out of the terminal: remarks about its own defaults, and tracebacks of errors that it raises too."""
    logger = logging.getLogger("absl")
    if _from_orbax not in logger.filters:
        logger.addFilter(_from_orbax)


def _from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname.replace("\\", "/")
