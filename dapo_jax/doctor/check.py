"""Defines checks and their results, and runs a list of checks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dapo_jax.config import ConfigError
from dapo_jax.doctor.subject import Subject

State = Literal["ok", "warning", "failed", "skipped"]

_MOST = 700
"""Error messages are truncated to this many characters, because compiler errors can fill pages."""


@dataclass(frozen=True)
class Found:
    """The result of a check, as text for the user."""

    message: str
    state: State = "ok"
    remedy: str = ""
    """The suggested fix. Empty if no fix is needed, or if `message` already contains it, as in a `ConfigError`."""
    details: tuple[str, ...] = ()
    """Further lines to print below the table of results."""
    seconds: float = field(default=0.0, compare=False)
    """Duration of the check."""


@dataclass(frozen=True)
class Check:
    """One check that `dapo-jax doctor` runs."""

    name: str
    look: Callable[[Subject], Found]
    """Runs the check. An exception is reported as a failure."""
    needs: tuple[str, ...] = ()
    """Names of earlier checks. If any of them failed or was skipped, this check is skipped."""
    remedy: str = ""
    """The suggested fix if the check raises an exception other than ConfigError."""


def examine(
    checks: Sequence[Check], subject: Subject, *, before: Callable[[Check], object] = lambda check: None
) -> dict[str, Found]:
    """Runs the checks in order, and returns their results by name. If a check fails, only the checks that depend on it are skipped.

    `before` is called with each check just before the check runs.
    """
    results: dict[str, Found] = {}
    for check in checks:
        began = time.monotonic()
        needed = [(name, results[name]) for name in check.needs if name in results]
        if missing := [(name, need) for name, need in needed if need.state in ("failed", "skipped")]:
            name, need = missing[0]
            result = Found(f"because '{name}' failed" if need.state == "failed" else need.message, "skipped")
        else:
            before(check)
            try:
                result = check.look(subject)
            except ConfigError as error:
                result = Found(shortened(str(error)), "failed")
            except Exception as error:  # reported, because it would also end a run
                notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
                message = shortened(f"{type(error).__name__}: {error}") + notes
                result = Found(message, "failed", check.remedy)
        results[check.name] = replace(result, seconds=time.monotonic() - began)
    return results


def shortened(text: str, most: int = _MOST) -> str:
    """Joins the text into one line and truncates it to `most` characters.

    >>> shortened("a  b\\nc"), shortened("abcdef", 5)
    ('a b c', 'ab...')
    """
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
