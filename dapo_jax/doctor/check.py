"""A check, its result, and the run of a list of checks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dapo_jax.config import ConfigError
from dapo_jax.doctor.subject import Subject

State = Literal["ok", "warning", "failed", "skipped"]

_MOST = 700
"""Characters of an error that are shown: compilers write pages."""


@dataclass(frozen=True)
class Found:
    """The result of a check, in words for a person."""

    message: str
    state: State = "ok"
    remedy: str = ""
    """The action to take; empty if `message` names it, as a `ConfigError` does."""
    details: tuple[str, ...] = ()
    """Lines that are printed below the table."""


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    look: Callable[[Subject], Found]
    """Makes the check; an exception is a failure."""
    needs: tuple[str, ...] = ()
    """Earlier checks without which this one makes no sense."""
    remedy: str = ""
    """The remedy for an exception other than ConfigError."""


@dataclass(frozen=True)
class Finding:
    """A check's result and the time it took."""

    name: str
    found: Found
    seconds: float


def examine(
    checks: Sequence[Check], subject: Subject, *, before: Callable[[Check], object] = lambda check: None
) -> list[Finding]:
    """Makes every check in order; after a failure only the checks that need it are skipped.

    `before` is called with each check that is about to be made.
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
            except Exception as error:  # a run would end with the same error
                notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
                message = shortened(f"{type(error).__name__}: {error}") + notes
                found = Found(message, "failed", check.remedy)
        findings[check.name] = Finding(check.name, found, time.monotonic() - began)
    return list(findings.values())


def shortened(text: str, most: int = _MOST) -> str:
    """Returns the text in one line of at most `most` characters.

    >>> shortened("a  b\\nc"), shortened("abcdef", 5)
    ('a b c', 'ab...')
    """
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
