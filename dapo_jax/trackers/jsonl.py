"""metrics.jsonl: one strictly valid JSON object a line, `step` first, one line a step.

JSON has no nan and no infinity: both are written as null, "there is no number here".

An object in a bucket cannot be appended to. There the lines are in metrics/000001.jsonl and its like, each named by its
first step and of up to `LINES_PER_OBJECT` lines, and every step replaces the last of them by one that is a line longer. A
step's line is stored when `log` returns, a write that is cut short leaves what was there, one that is tried again changes
nothing, and what a step sends does not grow with the run. `read_metrics` reads the file and the objects alike.
"""

import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from dapo_jax.plain_json import read_numbers
from dapo_jax.storage import AnyPath, entries, in_bucket, path_of, size_of, write_whole

LINES_PER_OBJECT = 32
"""A line of a training step is about 2 kB, so a step sends 32 kB on average; 10,000 steps are 313 objects."""


class JsonlTracker:
    """Keeps each step's metrics as a line; it is handed to the system, or stored in the bucket, before `log` returns.

    Args:
        path: the file; its folder is created. In a bucket the lines go into a folder beside it, see above.
        resume_step: the step of the checkpoint a run goes on from. Lines of later steps, and a last line that
            was cut short, are removed first, the last ones first: a file all at once or not at all; the run will write
            those steps again. Use -1 to keep nothing. None is a new run, which must not have lines yet.

    Raises:
        FileExistsError: a new run would append to another run's metrics.
        ValueError: the file to resume is not what this class writes.
        OSError: it cannot be written; the message names the file.
    """

    def __init__(self, path: str | PathLike[str], resume_step: int | None = None) -> None:
        self.path = path_of(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step: int | None = None
        if resume_step is not None:
            self._last_step = _cut_after(self.path, resume_step)
        else:
            for file in _files_of(self.path):
                if size := size_of(file):
                    raise FileExistsError(
                        f"{file} already holds {size} bytes of metrics: resume that run, or choose another run_dir"
                    )
        self._lines = _Objects(self.path) if in_bucket(self.path) else _File(self.path)

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
        try:
            self._lines.append(step, json.dumps(line, allow_nan=False).encode() + b"\n")
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                error.errno, f"cannot write the metrics of step {step} ({reason})", str(self.path)
            ) from error
        self._last_step = step

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


class _File:
    """Lines appended to one file."""

    def __init__(self, path: AnyPath) -> None:
        # Unbuffered: a line that fails for lack of space must not be tried again when the file is closed.
        self._file: Any = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`

    def append(self, step: int, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[self._file.write(view) :]

    def close(self) -> None:
        self._file.close()


class _Objects:
    """Lines in objects, of which the last is replaced by a longer one until it is full."""

    def __init__(self, path: AnyPath) -> None:
        self._folder, self._name, self._lines = _folder_of(path), "", list[bytes]()

    def append(self, step: int, line: bytes) -> None:
        if len(self._lines) % LINES_PER_OBJECT == 0:
            self._name, self._lines = f"{step:06d}.jsonl", []
        lines = [*self._lines, line]
        write_whole(self._folder / self._name, b"".join(lines))
        self._lines = lines

    def close(self) -> None:
        pass


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Every line of a metrics file, in order; null comes back as None.

    A last line cut short (by a kill, or because a live run is writing it) is left out.

    Args:
        path: RUN/metrics.jsonl, also where the lines are in the objects of RUN/metrics.

    Raises:
        ValueError: another line is not a JSON object with an integer `step`, or it is no file; names the file and line number.
        FileNotFoundError: there are neither.
    """
    path = path_of(path)
    rows = [row for file in _files_of(path) or [path] for row, _ in _parsed(file, _content(file))]
    return sorted(rows, key=lambda row: row["step"])


class LineFollower:
    """`read_metrics` of a run that goes on: of a local file only what was added since is read."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path_of(path)
        self._rows: list[dict[str, Any]] = []
        self._read, self._file = 0, (0, 0)
        """Bytes of `_rows`, and which file they are of: a run that is resumed may replace it."""

    def read(self) -> list[dict[str, Any]]:
        """The lines that `read_metrics` reads."""
        path = self._path
        if not isinstance(path, Path) or _files_of(path) != [path]:
            return read_metrics(path)
        _check(path)
        about = path.stat()
        if (about.st_dev, about.st_ino) != self._file or about.st_size < self._read:
            self._rows, self._read, self._file = [], 0, (about.st_dev, about.st_ino)
        with path.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        last = []
        for row, line in _parsed(path, content, before=len(self._rows)):
            if content[len(line) :].startswith(b"\n"):
                content = content[len(line) + 1 :]
                self._rows.append(row)
                self._read += len(line) + 1
            else:
                last = [row]  # it may yet grow
        return sorted([*self._rows, *last], key=lambda row: row["step"])


def _folder_of(path: AnyPath) -> AnyPath:
    return path.with_name(path.stem)


def _files_of(path: AnyPath) -> list[AnyPath]:
    """The file, and the objects beside it: a run that was copied from a bucket to a disk or back may have both."""
    folder = _folder_of(path)
    objects = [file for file in entries(folder) if file.suffix == path.suffix] if folder.is_dir() else []
    return [path, *objects] if path.exists() else objects


def _content(file: AnyPath) -> bytes:
    _check(file)
    return file.read_bytes()


def _check(file: AnyPath) -> None:
    """Refuses what is no file: reading a pipe or a device may have no end.

    Raises:
        ValueError: it is none.
    """
    if isinstance(file, Path) and file.exists() and not file.is_file():
        raise ValueError(f"{file} is no file")


def _parsed(path: AnyPath, content: bytes, *, before: int = 0) -> list[tuple[dict[str, Any], bytes]]:
    """Each whole line of a file's content, `before` lines into the file, as an object and as it stands there."""
    found: list[tuple[dict[str, Any], bytes]] = []
    lines = content.rstrip(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=before + 1):
        try:
            row = read_numbers(line)
            if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                raise ValueError('not an object with an integer "step"')
        except (ValueError, RecursionError) as error:
            if number == before + len(lines):
                break
            raise ValueError(f"{path}, line {number} is damaged ({error}): {line[:80]!r}") from error
        found.append((row, line))
    return found


def _number(value: float | int) -> float | int | None:
    if isinstance(value, int):
        return +value  # turns True into 1
    number = float(value)
    return number if math.isfinite(number) else None


def _cut_after(path: AnyPath, step: int) -> int | None:
    """Removes lines of steps above `step` and returns the last step that stays."""
    steps: list[int] = []
    for file in reversed(_files_of(path)):
        kept = [(row["step"], line) for row, line in _parsed(file, _content(file)) if row["step"] <= step]
        whole = b"".join(line + b"\n" for _, line in kept)
        if not kept and file != path:
            file.unlink()
        elif whole != _content(file):
            write_whole(file, whole)
        steps += [number for number, _ in kept]
    return max(steps, default=None)
