"""Files of JSON lines that are written whole: what the logs of rollouts and of problems share."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dapo_jax.plain_json import integer
from dapo_jax.storage import AnyPath, file_bytes, write_whole


def write_lines(path: AnyPath, rows: Iterable[Mapping[str, Any]], *, what: str) -> None:
    """Writes one row a line, all of them or none; a file of that name is replaced, its folder created if needed.

    Args:
        path: the file.
        rows: what JSON cannot say in them is written as its text.
        what: what the rows are, in the plural, for the message.

    Raises:
        ValueError: a number is nan or infinite; JSON has none.
        OSError: it cannot be written; the message names the file.
    """
    text = "".join(
        json.dumps(row, allow_nan=False, ensure_ascii=False, default=_plain) + "\n" for row in rows
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A sampled token may decode to half a surrogate pair, which is not UTF-8.
        write_whole(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise OSError(error.errno, f"cannot write {what} ({error.strerror or error})", str(path)) from error


def read_lines(path: AnyPath, *, what: str, version: int, needs: str) -> list[dict[str, Any]]:
    """The rows that `write_lines` wrote, in order.

    Args:
        path: the file.
        what: what a row is, with its article, for the message.
        version: the highest `schema_version` that the caller knows.
        needs: a key that tells these rows from others.

    Raises:
        ValueError: a line is no such row, or is of a newer version; the message names file and line number.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(file_bytes(path).split(b"\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line, parse_int=integer)
            newer = row["schema_version"] > version
            if not newer and needs not in row:
                raise KeyError(needs)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not {what} ({error!r}): {line[:80]!r}") from error
        if newer:
            raise ValueError(
                f"{path}, line {number} has schema_version {row['schema_version']}; this version of dapo_jax reads up "
                f"to {version}: upgrade dapo_jax"
            )
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """A data row may hold numpy values; what JSON cannot say becomes its text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
