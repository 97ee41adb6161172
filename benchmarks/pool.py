"""Runs worker processes, one at a time. The other workers are stopped by a signal, so that their idle threads cannot use the CPU."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workload import Workload

ROOT = Path(__file__).parent.parent
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Answer:
    """The result of a worker's method, and its duration in seconds, measured inside the worker."""

    seconds: float
    result: Any


def end_workers_on_sigterm() -> None:
    """Turns SIGTERM into an exception, so that the caller's `finally` ends the workers. Stopped workers cannot detect that the caller has ended."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


class WorkerError(RuntimeError):
    """A worker returned an error, died or exceeded its time limit."""


class Worker:
    """Runs one system in its own process, on the first `threads` of this process's CPUs."""

    def __init__(
        self,
        module: str,
        python: str | os.PathLike[str],
        workload: Workload,
        *,
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.module, self.log = module, log
        cpus = len(os.sched_getaffinity(0))
        if cpus < workload.threads:
            raise ValueError(f"--threads {workload.threads}: this process may use {cpus} CPUs")
        threads = {name: str(workload.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "JAX_PLATFORMS": "cpu"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.worker", module, workload.to_json()],
                cwd=ROOT,
                env={**os.environ, **threads, **offline, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._peak = 0.0

    def ready(self, *, timeout_s: float = 1200.0) -> Answer:
        """Waits until the system is loaded, and then stops the worker. The result is the system's version."""
        try:
            return self._answer(timeout_s)
        finally:
            self._signal(signal.SIGSTOP)

    def call(self, name: str, *, timeout_s: float = 1800.0, **arguments: Any) -> Answer:
        """Resumes the worker, calls one of its methods, and stops the worker again."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            return self._answer(timeout_s)
        except BrokenPipeError as error:
            raise WorkerError(f"{self.module} has ended; see {self.log}") from error
        finally:
            self._peak = max(self._peak, self._peak_now())
            self._signal(signal.SIGSTOP)

    @property
    def peak_gb(self) -> float:
        """Peak resident memory in GB of the process and its children, as the kernel counted it (VmHWM)."""
        self._peak = max(self._peak, self._peak_now())
        return self._peak

    def cpu_s(self) -> float:
        """Returns the CPU seconds used so far by the process and its running children."""
        total = 0
        for pid in self._processes():
            fields = _stat(pid)
            total += int(fields[11]) + int(fields[12]) if fields else 0
        return total / _TICKS

    def close(self) -> None:
        """Kills the process and its children."""
        for pid in self._processes():
            _send(pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self, timeout_s: float) -> Answer:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        # `select` does not see buffered lines. No lines are buffered, because the reply to each request is a single line.
        while not select.select([self._process.stdout], [], [], 1.0)[0]:
            if time.monotonic() > deadline:
                raise WorkerError(f"{self.module} did not answer within {timeout_s:.0f} s; see {self.log}")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerError(f"{self.module} died ({code}; -9 often means out of memory); see {self.log}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.module}: {answer['error']}; see {self.log}")
        return Answer(answer["seconds"], answer["result"])

    def _processes(self) -> list[int]:
        """Returns the ids of the running processes in the worker's session."""
        session, found = self._process.pid, []
        for entry in os.listdir("/proc"):
            fields = _stat(int(entry)) if entry.isdigit() else None
            if fields and int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry))
        return found

    def _signal(self, which: signal.Signals) -> None:
        for pid in self._processes():
            _send(pid, which)

    def _peak_now(self) -> float:
        return sum(_status_kb(pid, "VmHWM") for pid in self._processes()) / 1e6


def _send(pid: int, which: signal.Signals) -> None:
    # The process may have ended in the meantime.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, which)


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state onwards, or None if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _status_kb(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)
