"""Loads rows from the user's parquet and JSON Lines files."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

KINDS = (".parquet", ".jsonl", ".ndjson", ".jsonl.gz")
_ROWS_AT_ONCE = 1024
"""Number of rows per batch when a parquet file is decoded."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files that a builder loads, and the settings for loading them."""

    path: str = ""
    """A parquet or JSON Lines file, or a folder of such files."""
    options: Mapping[str, Any] = field(default_factory=dict)
    on_bad_row: str = "error"
    """`error` to raise at the first bad row, or `skip` to leave out bad rows and count them."""
    deduplicate: tuple[str, ...] = ("prompt",)
    """Fields by which rows are compared. If several rows in a split have the same values, only the first of them is kept. Without fields, all rows are kept."""


FileRow: TypeAlias = tuple[str, Mapping[str, Any] | Exception]
"""A row's position for error messages, such as `train.jsonl, line 17` (counted from 1), and the row's fields, or an exception if the row is bad."""


def data_files(path: Path) -> list[Path]:
    """Returns the data files at `path`: the file itself, or if it is a folder, all files in it with an extension in `KINDS`, sorted by name.

    If a folder has no such files, but exactly one of its folders has some, returns the files of the inner folder. Raises ValueError if the file or folder does
    not exist, or there is no file with a supported extension.
    """
    if path.is_dir():
        inside = [file for file in (*path.iterdir(), *path.glob("*/*")) if file.name.endswith(KINDS)]
        files = sorted(filter(Path.is_file, inside))
        folders = sorted({file.parent.name for file in files})
        here = [file for file in files if file.parent == path]
        if here or len(folders) == 1:  # the folder `data` of a dataset on the hub
            return here or files
        where = f", but its folders {', '.join(folders)} have some: choose one" if folders else ""
        raise ValueError(f"the folder {path} has no data file{where}; data files end in {', '.join(KINDS)}")
    if not path.is_file():
        raise ValueError(f"there is no file or folder {path} (current folder: {Path.cwd()})")
    if not path.name.endswith(KINDS):
        raise ValueError(f"{path.name} is not a data file; data files end in {', '.join(KINDS)}")
    return [path]


def file_rows(path: Path) -> Iterator[FileRow]:
    """Yields all rows of one file in order. For a bad row, yields an exception instead of the fields. Raises ValueError if the file is damaged."""
    return _parquet_rows(path) if path.suffix == ".parquet" else _line_rows(path)


def _line_rows(path: Path) -> Iterator[FileRow]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path.name}, line {number}", _fields(line)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read after line {number}: {error}") from error


def _fields(line: bytes) -> Mapping[str, Any] | Exception:
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig"), object_pairs_hook=_object)
    except _RepeatedKeyError as error:
        return error
    except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError and JSONDecodeError
        return ValueError(f"not JSON: {error}")
    return value if isinstance(value, dict) else ValueError(f"not a JSON object: a {type(value).__name__}")


class _RepeatedKeyError(ValueError):
    """A key occurs twice in an object. Python's `json` would silently use the last one."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RepeatedKeyError(f"the key {twice!r} occurs twice in one object; keep one of the two")
    return fields


def _parquet_rows(path: Path) -> Iterator[FileRow]:
    """Yields the rows of a parquet file. Decodes one row group at a time, so the largest row group limits the memory use."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], use_threads=False):
                    for fields in _python_rows(batch):
                        number += 1
                        yield f"{path.name}, row {number}", fields
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet after row {number}: {error}") from error


def _python_rows(batch: Any) -> Iterator[Mapping[str, Any] | Exception]:
    """Yields the rows of a record batch. For a row with invalid UTF-8 or an impossible date, yields an exception."""
    try:
        yield from batch.to_pylist()  # much faster than row by row
    except (ValueError, OverflowError):
        for number in range(batch.num_rows):
            try:
                yield from batch.slice(number, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                yield ValueError(f"cannot be read: {error}")
