"""Writes and reads RUN/status.json, which records a run's state, and when and why the run ended.

If a run is killed, the state in its file remains `running`, so only `locks.is_held` shows whether the run is still active.
"""

import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from dapo_jax.config.keys import without_secrets
from dapo_jax.health.stopping import StoppedError
from dapo_jax.storage import AnyPath, file_bytes, write_whole
from dapo_jax.storage.locks import LockLostError

FILE = "status.json"

_LONGEST_REASON = 500
"""Error messages are truncated to this many characters."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The last status that a run wrote."""

    state: str
    """`running`, `finished`, `stopped` (by a signal) or `failed`."""
    at: str | None
    """The time at which the status was written (ISO 8601, UTC). If the run has ended, this is the time of its end."""
    reason: str = ""
    """The signal or the error that ended the run; empty otherwise."""
    process: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The command line, the machine, the devices and the versions of the process that wrote the status."""


@contextlib.contextmanager
def status_kept(run_dir: AnyPath, *, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Writes the state `running` on entry, and `stopped` or `failed` after an error. The caller writes `finished` after the run's last file.

    `check` raises LockLostError if another run has taken over the folder. In this case, the other run's status is not overwritten.
    """
    write_status(run_dir, "running")
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, StoppedError | KeyboardInterrupt)
        reason = f"{type(error).__name__}: {error}".removeprefix("StoppedError: ").removesuffix(": ")
        # If the status cannot be written (full disk, lost lock), the run's own error is still raised.
        with contextlib.suppress(OSError, LockLostError):
            check()
            write_status(run_dir, "stopped" if stopped else "failed", reason)
        raise


def write_status(run_dir: AnyPath, state: str, reason: str = "") -> None:
    """Replaces the status file."""
    import jax  # not at the top, because a report needs no devices

    program = os.path.basename(sys.argv[0]).replace("__main__.py", "dapo-jax")
    status = RunStatus(
        state=state,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=" ".join(without_secrets(reason).split())[:_LONGEST_REASON],
        process={
            "command line": without_secrets(shlex.join([program, *sys.argv[1:]])),
            "machine": f"{platform.node()}, {platform.platform()}",
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "versions": f"dapo_jax {sys.modules['dapo_jax'].__version__}, jax {jax.__version__}, Python {platform.python_version()}",
        },
    )
    write_whole(run_dir / FILE, json.dumps(asdict(status)).encode("utf-8", errors="replace") + b"\n")


def read_status(run_dir: AnyPath) -> RunStatus | None:
    """Returns the status in the file, or None if the file is missing or damaged."""
    try:
        return RunStatus(**json.loads(file_bytes(run_dir / FILE)))
    except (OSError, ValueError, TypeError):
        return None
