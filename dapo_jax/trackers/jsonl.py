"""metrics.jsonl: one strictly valid JSON object a line, `step` first, one line a step.

JSON has no nan and no infinity: both are written as null, "there is no number here".
"""

import json
import math
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any


class JsonlTracker:
    """Appends each step's metrics to a file; every line is handed to the system before `log` returns.

    Args:
        path: the file; its folder is created. On a local (or mounted) file system: it is appended to.
        resume_step: the step of the checkpoint a run goes on from. Lines of later steps, and a last line that
            was cut short, are removed first, all at once or not at all; the run will write those steps
            again. Use -1 to keep nothing. None is a new run, whose file must not hold lines yet.

    Raises:
        FileExistsError: a new run would append to another run's metrics.
        ValueError: the file to resume is not what this class writes.
        OSError: it cannot be written; the message names the file.
    """

    def __init__(self, path: str | PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step: int | None = None
        if resume_step is not None:
            self._last_step = _cut_after(self.path, resume_step)
        elif self.path.exists() and self.path.stat().st_size > 0:
            raise FileExistsError(
                f"{self.path} already holds {self.path.stat().st_size} bytes of metrics: resume that run, or choose "
                "another run_dir"
            )
        # Unbuffered: a line that fails for lack of space must not be tried again when the file is closed.
        self._file = self.path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Appends one line.

        Raises:
            ValueError: `step` is not above the last one, or a metric is called "step".
            OSError: the line could not be written; the message names the step and the file.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"{self.path} already has step {self._last_step}, got step {step}: log each step once, all its "
                "metrics (evaluation too) in one call"
            )
        if "step" in metrics:
            raise ValueError('a metric may not be called "step": that is the line\'s own key')
        line = {"step": step} | {name: _number(value) for name, value in metrics.items()}
        _write_all(self._file, json.dumps(line, allow_nan=False).encode() + b"\n", step, self.path)
        self._last_step = step

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Every line of a metrics file, in order; null comes back as None.

    A last line cut short (by a kill, or because a live run is writing it) is left out.

    Raises:
        ValueError: another line is not a JSON object with an integer `step`; names the file and line number.
    """
    return [row for row, _ in _parsed(Path(path))]


def _parsed(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Each whole line as an object and as it stands in the file."""
    found: list[tuple[dict[str, Any], bytes]] = []
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                raise ValueError('not an object with an integer "step"')
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is damaged ({error}): {line[:80]!r}") from error
        found.append((row, line))
    return found


def _number(value: float | int) -> float | int | None:
    if isinstance(value, int):
        return +value  # turns True into 1
    number = float(value)
    return number if math.isfinite(number) else None


def _write_all(file: Any, data: bytes, step: int, path: Path) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write the metrics of step {step} ({error.strerror})", str(path)
        ) from error


def _cut_after(path: Path, step: int) -> int | None:
    """Removes lines of steps above `step` and returns the last step that stays."""
    if not path.exists():
        return None
    kept = [(row["step"], line) for row, line in _parsed(path) if row["step"] <= step]
    whole = b"".join(line + b"\n" for _, line in kept)
    if whole != path.read_bytes():
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            file.write(whole)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    return kept[-1][0] if kept else None
