"""RUN/status.json: the state of a run, and the time and reason of its end.

The file of a killed run keeps the state `running`; `locks.is_held` then shows whether the run is still at work.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from dapo_jax.config.keys import without_secrets
from dapo_jax.health.stopping import StoppedError
from dapo_jax.locks import LockLostError
from dapo_jax.storage import AnyPath, file_bytes, write_whole

FILE = "status.json"

_LONGEST_REASON = 500
"""Characters of an error that are kept."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The last status that a run wrote."""

    state: str
    """`running`, `finished`, `stopped` (by a signal) or `failed`."""
    at: str | None
    """Time of writing, for an ended run the time of its end: ISO 8601, UTC."""
    reason: str = ""
    """The signal or the error; empty otherwise."""


@contextlib.contextmanager
def status_kept(run_dir: AnyPath, *, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Writes `running`, and `stopped` or `failed` after an error. The caller writes `finished` with `write_status`, after the last file.

    `check` raises LockLostError if another run has taken over the folder, whose status is then kept.
    """
    write_status(run_dir, "running")
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, StoppedError | KeyboardInterrupt)
        reason = f"{type(error).__name__}: {error}".removeprefix("StoppedError: ").removesuffix(": ")
        # This error matters more than a full disk or a lost lock while it is written.
        with contextlib.suppress(OSError, LockLostError):
            check()
            write_status(run_dir, "stopped" if stopped else "failed", reason)
        raise


def write_status(run_dir: AnyPath, state: str, reason: str = "") -> None:
    """Replaces the file."""
    status = RunStatus(
        state=state,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=" ".join(without_secrets(reason).split())[:_LONGEST_REASON],
    )
    write_whole(run_dir / FILE, json.dumps(asdict(status)).encode("utf-8", errors="replace") + b"\n")


def read_status(run_dir: AnyPath) -> RunStatus | None:
    """Returns the status in the file; None if the file is missing or damaged."""
    try:
        return RunStatus(**json.loads(file_bytes(run_dir / FILE)))
    except (OSError, ValueError, TypeError):
        return None
