"""RUN/status.json: whether a run runs, or when and why it ended. One that is killed cannot say so: its file says `running` for ever."""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dapo_jax.config.values import without_secrets
from dapo_jax.health.stopping import StoppedError
from dapo_jax.locks import LockLostError
from dapo_jax.storage import AnyPath, file_bytes, write_whole

FILE = "status.json"

_LONGEST_REASON = 500
"""Characters of an error that are kept."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """The marks that tell a process from all others, also from a later one of its number."""

    host: str
    boot: str
    """The mark of the machine's start; empty where the system does not say."""
    pid: int
    started: str
    """The process's start, in the system's ticks; empty where it does not say."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status that a run wrote last."""

    state: str
    """`running`, `finished`, `stopped` (it was told to) or `failed`."""
    at: str
    """When it said so: ISO 8601, UTC."""
    reason: str
    """Who told it to stop, or its error."""
    process: Process

    @property
    def is_alive(self) -> bool | None:
        """Whether its process runs on this machine; None if that cannot be known, as of another machine's."""
        mine = _this_process()
        if not self.process.boot or (self.process.host, self.process.boot) != (mine.host, mine.boot):
            return None
        return _started(self.process.pid) == self.process.started


@contextlib.contextmanager
def status_kept(run_dir: AnyPath, *, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Says `running`, and at an error or a stop what it was. Who gets to the end says `finished` with `write_status`, after the last file.

    `check` raises LockLostError if the folder is another run's by now, whose status then stays.
    """
    write_status(run_dir, "running")
    try:
        yield
    except StoppedError as stopped:
        _last_words(run_dir, check, "stopped", str(stopped))
        raise
    except KeyboardInterrupt:
        _last_words(run_dir, check, "stopped", "KeyboardInterrupt")
        raise
    except BaseException as error:
        _last_words(run_dir, check, "failed", f"{type(error).__name__}: {error}")
        raise


def write_status(run_dir: AnyPath, state: str, reason: str = "") -> None:
    """Replaces the file.

    Raises:
        OSError: it cannot be written.
    """
    status = RunStatus(
        state=state,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=" ".join(without_secrets(reason).split())[:_LONGEST_REASON],
        process=_this_process(),
    )
    write_whole(run_dir / FILE, json.dumps(asdict(status)).encode("utf-8", errors="replace") + b"\n")


def read_status(run_dir: AnyPath) -> RunStatus | None:
    """The status in the file; None if there is none, or it is not what `write_status` writes: a run from before has none."""
    try:
        said = json.loads(file_bytes(run_dir / FILE))
        told = said["process"]
        process = Process(
            host=str(told["host"]), boot=str(told["boot"]), pid=int(told["pid"]), started=str(told["started"])
        )
        at = datetime.fromisoformat(said["at"])
        if at.tzinfo is None:
            return None
        return RunStatus(state=str(said["state"]), at=said["at"], reason=str(said["reason"]), process=process)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _last_words(run_dir: AnyPath, check: Callable[[], None], state: str, reason: str) -> None:
    """The error that ends the run is worth more than that of a full disk, or of a lost lock, which comes of writing it down."""
    with contextlib.suppress(OSError, LockLostError):
        check()
        write_status(run_dir, state, reason)


def _this_process() -> Process:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return Process(
        host=socket.gethostname(),
        boot=boot.read_text().strip() if boot.is_file() else "",
        pid=os.getpid(),
        started=_started(os.getpid()),
    )


def _started(pid: int) -> str:
    """Empty if there is no such process, or the system does not say."""
    try:
        # The second field is the program's name in parentheses, which may hold spaces; the start is the 22nd.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
