"""The parts of an examination: checks that each find one thing out, and what depends on what."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dapo_jax.config import ConfigError

State = Literal["ok", "warning", "failed", "skipped"]

_MOST = 700
"""Characters of an error that are shown: compilers write pages."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The finding of a check, in words for a person."""

    message: str
    state: State = "ok"
    remedy: str = ""
    """The action to take; empty where `message` holds it, as the messages of a `ConfigError` do."""
    details: tuple[str, ...] = ()
    """Lines that are shown below the table."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to find out."""

    name: str
    look: Callable[[], Found]
    """Finds out; an exception is a failure."""
    remedy: str = ""
    """The remedy for a failure whose message does not hold one."""
    needs: tuple[str, ...] = ()
    """Checks that come before, without which it makes no sense."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A check's outcome."""

    name: str
    found: Found
    seconds: float

    @property
    def state(self) -> State:
        """The state that was found."""
        return self.found.state


def examine(
    checks: Sequence[Check], *, before: Callable[[Check], object] = lambda check: None
) -> list[Finding]:
    """The outcome of every check, in their order; one that fails ends none but those that need it.

    `before` is called with each check that is about to be made.
    """
    findings: dict[str, Finding] = {}
    for check in checks:
        began = time.monotonic()
        found = _skipped(check, findings)
        if found is None:
            before(check)
            found = _looked(check)
        findings[check.name] = Finding(name=check.name, found=found, seconds=time.monotonic() - began)
    return list(findings.values())


def _skipped(check: Check, findings: dict[str, Finding]) -> Found | None:
    for name in check.needs:
        needed = findings[name].found
        if needed.state == "failed":
            return Found(state="skipped", message=f"because '{name}' failed")
        if needed.state == "skipped":
            return Found(state="skipped", message=needed.message)
    return None


def _looked(check: Check) -> Found:
    try:
        return check.look()
    except ConfigError as error:
        return Found(state="failed", message=shortened(str(error)))
    except Exception as error:  # whatever a phase raises is what a run would end with
        return Found(
            state="failed", message=shortened(f"{type(error).__name__}: {error}"), remedy=check.remedy
        )


def shortened(text: str, most: int = _MOST) -> str:
    """The text in one line of at most `most` characters.

    >>> shortened("a  b\\nc"), shortened("abcdef", 5)
    ('a b c', 'ab...')
    """
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
