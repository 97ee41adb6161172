"""Rows of files that a user names: parquet and JSON lines, one file or a folder of them. Each row comes with its place.

What cannot be read is a row with a `problem` rather than an exception: the caller decides whether one bad row ends it all.

A file of its own: it knows files and rows, and nothing of TensorFlow Datasets.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from dapo_jax.data.parquet_rows import MAX_ROW_BYTES, parquet_rows

KINDS = (".parquet", ".jsonl", ".ndjson", ".jsonl.gz")

MAX_LINE_BYTES = MAX_ROW_BYTES
"""The largest line. A small .gz file may hold a line that fills any memory."""


@dataclass(frozen=True, kw_only=True)
class FileRow:
    """One row of a file, or what is wrong with it."""

    place: str
    """For messages: `train.jsonl, line 17` or `part.parquet, row 17`, counted from 1 as editors do."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why there are no fields; empty if there are."""


def data_files(path: Path) -> list[Path]:
    """The files that `path` names: itself, or what its folder holds of `KINDS`, sorted by name.

    Raises:
        ValueError: nothing is there, or nothing of a known kind.
    """
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(KINDS))
        if not found:
            raise ValueError(f"the folder {path} has no file of the kinds {', '.join(KINDS)}")
        return found
    if not path.is_file():
        raise ValueError(f"there is no file or folder {path} (looked from {Path.cwd()})")
    if not path.name.endswith(KINDS):
        raise ValueError(f"{path.name} is of no known kind; data files end in {', '.join(KINDS)}")
    return [path]


def file_rows(path: Path) -> Iterator[FileRow]:
    """All rows of one file.

    Raises:
        ValueError: a file that is damaged as a whole, so that no row can be told apart.
    """
    return _parquet_rows(path) if path.suffix == ".parquet" else _line_rows(path)


def _line_rows(path: Path) -> Iterator[FileRow]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(_lines(lines), start=1):
                if line.strip():
                    yield _line_row(f"{path.name}, line {number}", line)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read behind line {number}: {error}") from error


def _lines(file: BufferedIOBase) -> Iterator[bytes]:
    """The lines of a file, none of which is read further than `MAX_LINE_BYTES`."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise OSError(
                f"the next line is longer than {MAX_LINE_BYTES:,} bytes; put each row on its own line"
            )
        yield line


def _line_row(place: str, line: bytes) -> FileRow:
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return FileRow(
            place=place, problem=f"byte {error.start + 1} of the line is not UTF-8: {error.reason}"
        )
    except json.JSONDecodeError as error:
        return FileRow(place=place, problem=f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets without end
        return FileRow(place=place, problem=f"cannot be read: {error}")
    if not isinstance(value, dict):
        return FileRow(place=place, problem=f"needs a JSON object; this is a {type(value).__name__}")
    return FileRow(place=place, fields=value)


def _parquet_rows(path: Path) -> Iterator[FileRow]:
    number = 0
    try:
        for fields in parquet_rows(path):
            number += 1
            place = f"{path.name}, row {number}"
            if isinstance(fields, UnicodeDecodeError):
                yield FileRow(place=place, problem=f"a text is not UTF-8: {fields.reason}")
            elif isinstance(fields, Exception):
                yield FileRow(place=place, problem=f"a value that Python cannot hold: {fields}")
            else:
                yield FileRow(place=place, fields=fields)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as parquet behind row {number}: {error}") from error
