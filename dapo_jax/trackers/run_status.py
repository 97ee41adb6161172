"""RUN/status.json: the state of a run, and the time and reason of its end.

The file of a killed run keeps the state `running`; `RunStatus.is_alive` then checks whether its process exists.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dapo_jax.config.keys import without_secrets
from dapo_jax.health.stopping import StoppedError
from dapo_jax.locks import LockLostError
from dapo_jax.storage import AnyPath, file_bytes, write_whole

FILE = "status.json"

_LONGEST_REASON = 500
"""Characters of an error that are kept."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """Identifies a process, also among later processes with the same number."""

    host: str
    boot: str
    """Id of the machine's boot; empty if the system has none."""
    pid: int
    started: str
    """Start of the process, in the system's ticks; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The last status that a run wrote."""

    state: str
    """`running`, `finished`, `stopped` (by a signal) or `failed`."""
    at: str
    """Time of writing: ISO 8601, UTC."""
    reason: str
    """The signal or the error; empty otherwise."""
    process: Process

    @property
    def is_alive(self) -> bool | None:
        """True if its process exists on this machine; None if unknown, as for a run of another machine."""
        mine = _this_process()
        if not self.process.boot or (self.process.host, self.process.boot) != (mine.host, mine.boot):
            return None
        return _started(self.process.pid) == self.process.started


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
        process=_this_process(),
    )
    write_whole(run_dir / FILE, json.dumps(asdict(status)).encode("utf-8", errors="replace") + b"\n")


def read_status(run_dir: AnyPath) -> RunStatus | None:
    """Returns the status in the file; None if the file is missing or damaged."""
    try:
        read: dict[str, Any] = json.loads(file_bytes(run_dir / FILE))
        process = Process(**read.pop("process"))
        return RunStatus(process=process, **read)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _this_process() -> Process:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return Process(
        host=socket.gethostname(),
        boot=boot.read_text().strip() if boot.is_file() else "",
        pid=os.getpid(),
        started=_started(os.getpid()),
    )


def _started(pid: int) -> str:
    """Returns the start of a process; empty if there is no such process, or the system does not know."""
    try:
        # The second field is the program's name in parentheses, which may hold spaces; the start is the 22nd.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
