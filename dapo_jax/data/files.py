"""Reads rows of the user's files: parquet and JSON lines, one file or a folder of them. Each row has its place.

A bad row has a `problem` instead of fields, so that the caller decides whether to stop or to skip it.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = (".parquet", ".jsonl", ".ndjson", ".jsonl.gz")
_ROWS_AT_ONCE = 1024
"""Rows of a parquet file that are decoded at once."""


@dataclass(frozen=True, kw_only=True)
class FileRow:
    """One row of a file, or its problem."""

    place: str
    """For messages: `train.jsonl, line 17` or `part.parquet, row 17`, counted from 1."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    """The reason why there are no fields; empty if there are."""


def data_files(path: Path) -> list[Path]:
    """Returns the file `path`, or the files of `KINDS` in the folder `path`, sorted by name.

    Raises:
        ValueError: there is no such file or folder, or no file of a known kind.
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
    """Yields all rows of one file, in their order.

    Raises:
        ValueError: the file is damaged, such as a half-written one.
    """
    return _parquet_rows(path) if path.suffix == ".parquet" else _line_rows(path)


def _line_rows(path: Path) -> Iterator[FileRow]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _line_row(f"{path.name}, line {number}", line)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read after line {number}: {error}") from error


def _line_row(place: str, line: bytes) -> FileRow:
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return FileRow(
            place=place, problem=f"byte {error.start + 1} of the line is not UTF-8: {error.reason}"
        )
    except json.JSONDecodeError as error:
        return FileRow(place=place, problem=f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # such as an integer of thousands of digits
        return FileRow(place=place, problem=f"cannot be read: {error}")
    if not isinstance(value, dict):
        return FileRow(place=place, problem=f"needs a JSON object; this is a {type(value).__name__}")
    return FileRow(place=place, fields=value)


def _parquet_rows(path: Path) -> Iterator[FileRow]:
    """Decodes one row group after the other, so that memory is bounded by the largest row group."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], use_threads=False):
                    for fields in _python_rows(batch):
                        number += 1
                        place = f"{path.name}, row {number}"
                        if isinstance(fields, Exception):
                            yield FileRow(place=place, problem=f"cannot be read: {fields}")
                        else:
                            yield FileRow(place=place, fields=fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet after row {number}: {error}") from error


def _python_rows(batch: Any) -> Iterator[Mapping[str, Any] | Exception]:
    """Yields the rows of a record batch; a row with a text that is not UTF-8, or an impossible date, is an exception."""
    try:
        yield from batch.to_pylist()  # much faster than one by one
    except (ValueError, OverflowError):
        for place in range(batch.num_rows):
            try:
                yield from batch.slice(place, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                yield error
