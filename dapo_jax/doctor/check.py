"""Defines checks and their results, and runs a list of checks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dapo_jax.config import ConfigError
from dapo_jax.doctor.subject import Subject

State = Literal["ok", "warning", "failed", "skipped"]

_MOST = 700
"""Maximum number of characters shown from an error message, because compiler errors may fill pages."""


@dataclass(frozen=True)
class Found:
    """The result of a check as text for the user."""

    message: str
    state: State = "ok"
    remedy: str = ""
    """The suggested action; empty if `message` already names it, as in a `ConfigError`."""
    details: tuple[str, ...] = ()
    """Lines that are printed below the table."""


@dataclass(frozen=True)
class Check:
    """One check of the doctor."""

    name: str
    look: Callable[[Subject], Found]
    """Runs the check. An exception is reported as a failure."""
    needs: tuple[str, ...] = ()
    """Names of earlier checks. If one of them failed or was skipped, this check is skipped."""
    remedy: str = ""
    """The remedy that is shown for an exception other than ConfigError."""


@dataclass(frozen=True)
class Finding:
    """A check's result and the time it took."""

    name: str
    found: Found
    seconds: float


def examine(
    checks: Sequence[Check], subject: Subject, *, before: Callable[[Check], object] = lambda check: None
) -> list[Finding]:
    """Runs all checks in order. If a check fails, only the checks that need it are skipped.

    `before` is called with each check before the check runs.
    """
    findings: dict[str, Finding] = {}
    for check in checks:
        began = time.monotonic()
        needed = [findings[name] for name in check.needs if name in findings]
        if failed := next((one for one in needed if one.found.state in ("failed", "skipped")), None):
            because = f"because '{failed.name}' failed"
            found = Found(because if failed.found.state == "failed" else failed.found.message, "skipped")
        else:
            before(check)
            try:
                found = check.look(subject)
            except ConfigError as error:
                found = Found(shortened(str(error)), "failed")
            except Exception as error:  # a run would fail with the same error
                notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
                message = shortened(f"{type(error).__name__}: {error}") + notes
                found = Found(message, "failed", check.remedy)
        findings[check.name] = Finding(check.name, found, time.monotonic() - began)
    return list(findings.values())


def shortened(text: str, most: int = _MOST) -> str:
    """Returns the text as one line of at most `most` characters.

    >>> shortened("a  b\\nc"), shortened("abcdef", 5)
    ('a b c', 'ab...')
    """
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
