"""Reads and writes JSON lines: metrics.jsonl, which grows by one line per step, and logs that are written all at once.

Each line is a strictly valid JSON object. JSON has no nan or infinity, so metrics.jsonl contains null instead.

Objects in a bucket cannot be appended to, so a run in a bucket stores the lines of metrics.jsonl in several objects, such as metrics/000001.jsonl. An
object is named after its first step and contains up to `LINES_PER_OBJECT` lines. Every step rewrites the last object with one more line.
`read_metrics` reads both the file and the objects.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from dapo_jax.storage import AnyPath, entries, file_bytes, in_bucket, path_of, size_of, write_whole

LINES_PER_OBJECT = 32
"""Maximum number of lines per object in a bucket. A line is about 2 kB long, so a step uploads 32 kB on average."""

SCHEMA_VERSION = 1
"""Format version of rollout logs, evaluation logs and post-mortems. It is stored in them for other programs that load them."""


def write_lines(path: AnyPath, rows: Iterable[Mapping[str, Any]], *, what: str) -> None:
    """Writes one row per line, atomically. Creates the folder if needed and replaces an existing file.

    Values that JSON cannot represent are written as text. `what` describes the rows in the message of an OSError. Raises ValueError if a number is nan or
    infinite.
    """
    encode = partial(json.dumps, allow_nan=False, ensure_ascii=False, default=_plain)
    text = "".join(f"{encode(row)}\n" for row in rows)
    with writing(what, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A sampled token may decode to half a surrogate pair, which cannot be encoded in UTF-8.
        write_whole(path, text.encode("utf-8", errors="replace"))


@contextmanager
def writing(what: str, path: AnyPath) -> Iterator[None]:
    """Adds `what` and the path to the message of an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {what} ({error.strerror or error})", str(path)) from error


def read_lines(path: AnyPath, *, what: str, needs: str, active: bool = False) -> list[dict[str, Any]]:
    """Returns the rows of a file, in order. If `active` is set, an incomplete last line is ignored. Raises ValueError if a line is not a JSON object with the
    key `needs`. The message contains `what`, the file and the line."""
    rows: list[dict[str, Any]] = []
    lines = file_bytes(path).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            _ = row[needs]
        except (ValueError, KeyError, TypeError) as error:
            if active and number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not {what} ({error!r}): {line[:80]!r}") from error
        rows.append(row)
    return rows


_read_steps = partial(read_lines, what="a line of metrics", needs="step", active=True)


def _plain(value: Any) -> Any:
    """Converts a value that JSON cannot represent: NumPy values to numbers or lists, bytes and all other types to text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


class JsonlTracker:
    """Writes each step's metrics as one line of metrics.jsonl. When `log` returns, the line is in the file or the bucket.

    Args:
        path: the file; its folder is created. In a bucket, the lines are stored in a folder next to it.
        resume_step: the step of the checkpoint from which a run resumes. Lines of later steps and an incomplete last line are removed,
            because the run repeats those steps; -1 removes all lines. None means a new run, which must not have any lines yet.

    Raises:
        FileExistsError: a new run would append to another run's metrics.
        ValueError: the file of a resumed run is damaged.
        OSError: the file cannot be written; the message names the file.
    """

    def __init__(self, path: str | PathLike[str], resume_step: int | None = None) -> None:
        self.path = path_of(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None and (found := [file for file in _files_of(self.path) if size_of(file)]):
            raise FileExistsError(
                f"{found[0]} already contains metrics: resume it, or choose another run_dir"
            )
        self._last_step = None if resume_step is None else _cut_after(self.path, resume_step)
        self._name, self._lines = "", list[bytes]()
        """The name of the last object written to the bucket, and its lines."""
        # Unbuffered: if the disk was full, closing a buffered file would try to write the failed line again.
        self._file: Any = None if in_bucket(self.path) else open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Appends one line.

        Raises:
            ValueError: `step` is not greater than the last step.
            OSError: the line could not be written; the message names the step and the file.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"{self.path} already has step {self._last_step}, got step {step}: log each step once, all its "
                "metrics (evaluation too) in one call"
            )
        line = {"step": step} | {name: _number(value) for name, value in metrics.items()}
        with writing(f"the metrics of step {step}", self.path):
            self._append(step, json.dumps(line, allow_nan=False).encode() + b"\n")
        self._last_step = step

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, step: int, line: bytes) -> None:
        if self._file is not None:
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) :]
            return
        if len(self._lines) % LINES_PER_OBJECT == 0:
            self._name, self._lines = f"{step:06d}.jsonl", []
        lines = [*self._lines, line]
        write_whole(self.path.with_name(self.path.stem) / self._name, b"".join(lines))
        self._lines = lines


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Returns every line of a metrics file, in step order; null is returned as None.

    An incomplete last line is ignored, because the run may still be writing it, or may have been killed while writing it.

    Args:
        path: RUN/metrics.jsonl, even if the lines are stored as objects in RUN/metrics.

    Raises:
        ValueError: any other line is not a JSON object with a `step`; the message names the file and the line.
        FileNotFoundError: neither the file nor the objects exist.
    """
    path = path_of(path)
    rows = [row for file in _files_of(path) or [path] for row in _read_steps(file)]
    return sorted(rows, key=lambda row: row["step"])


def _files_of(path: AnyPath) -> list[AnyPath]:
    """Returns the metrics file and the metrics objects that exist. A run that was copied between a bucket and a disk may have both."""
    folder = path.with_name(path.stem)
    objects = [file for file in entries(folder) if file.suffix == path.suffix] if folder.is_dir() else []
    return [path, *objects] if path.exists() else objects


def _number(value: float | int) -> float | int | None:
    if isinstance(value, int):
        return +value  # turns True into 1
    number = float(value)
    return number if math.isfinite(number) else None


def _cut_after(path: AnyPath, step: int) -> int | None:
    """Removes the lines of all steps after `step`, starting with the last file. Returns the last remaining step, or None."""
    steps: list[int] = []
    for file in reversed(_files_of(path)):
        content = file_bytes(file)
        pairs = zip(_read_steps(file), content.splitlines(), strict=False)  # the last line may be incomplete
        kept = [(row["step"], line) for row, line in pairs if row["step"] <= step]
        whole = b"".join(line + b"\n" for _, line in kept)
        if not kept and file != path:
            file.unlink()
        elif whole != content:
            write_whole(file, whole)
        steps += [number for number, _ in kept]
    return max(steps, default=None)
