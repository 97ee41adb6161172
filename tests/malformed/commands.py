"""Commands in a process of their own, and what a malformed input may at most do: a status, a few lines, nothing else."""

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
ROOT = CHILD.parents[2]
TIME_LIMIT_S = 60.0
"""For one command; the first one loads jax. A command that is longer under way hangs."""
MOST_LINES, MOST_CHARACTERS = 6, 2000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a command."""

    status: int | None
    """None: something left `main`, or there is no process any more."""
    said: str
    raised: str = ""
    """A traceback, or how the process ended."""


class Commands:
    """Starts a process when there is none, and another when that one is gone."""

    def __init__(self, home):
        self.home = home
        self._process = None

    def run(self, folder, *argv, limit_s=TIME_LIMIT_S):
        """What became of `dapo-jax ARGV` in `folder`."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        process.stdin.write(json.dumps({"argv": argv, "folder": str(folder)}).encode() + b"\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], limit_s)[0]:
            self.close()
            return Outcome(status=None, said="", raised=f"still under way after {limit_s} s")
        if not (line := process.stdout.readline()):
            status = process.wait()
            self._process = None
            return Outcome(status=None, said="", raised=f"the process ended with status {status}")
        return Outcome(**json.loads(line))

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self):
        environment = {
            **os.environ,
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        }
        environment.pop("RUST_BACKTRACE", None)
        return subprocess.Popen(
            [sys.executable, "-P", str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )


def listing(folder):
    """What lies in a folder: each path with its kind, size and time of change."""
    found = {}
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(base, name)
            state = os.lstat(path)
            # A folder's own time changes with what is in it, which is listed itself.
            changed = 0 if name in folders else state.st_mtime_ns
            found[os.path.relpath(path, folder)] = (
                state.st_mode,
                0 if name in folders else state.st_size,
                changed,
            )
    return found


def problem_of(outcome):
    """Why an outcome is none that a user's mistake may have; empty if it may."""
    if outcome.raised:
        return outcome.raised
    if outcome.status == 0:
        return ""
    if outcome.status not in (1, 2):
        return f"status {outcome.status}"
    said = outcome.said.strip()
    if not said:
        return "it failed without a word"
    if "Traceback" in said:
        return said
    if len(said.splitlines()) > MOST_LINES or len(said) > MOST_CHARACTERS:
        return f"{len(said.splitlines())} lines, {len(said)} characters: {said[:3000]}"
    return ""
