"""Rows of datasets. A row is a mapping with at least a prompt and an answer."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.text.formatting import checked_messages


class LoadedRows(Sequence[Mapping[str, Any]]):
    """The rows of a split. Each row is loaded when it is accessed."""

    def __init__(
        self,
        rows: Sequence[Any],
        note: str = "",
        read: Callable[[Any], Mapping[str, Any]] = lambda row: row,
        *,
        leaves_out: bool = False,
    ) -> None:
        """Wraps stored rows. `note` is a message about their number and rows that were left out (`leaves_out`). `read` decodes a stored row."""
        self._rows, self.note, self._read, self.leaves_out = rows, note, read, leaves_out

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is not in a split of {len(self)} rows")
        return self._read(self._rows[index % len(self)])


def checked_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Checks rows that were passed from Python. Each row must have a `prompt` and an `answer`. Other fields are kept.

    A prompt is a string, or a list of messages with `role` and `content`. An integer answer is converted to decimal text.

    Raises:
        ValueError: there are no rows, or a field is missing, empty or of the wrong type. The message names the row and the field.
    """
    if not rows:
        raise ValueError('no rows were given; each is a mapping such as {"prompt": "1+1", "answer": "2"}')
    checked: list[Mapping[str, Any]] = []
    for index, row in enumerate(rows):
        try:
            checked.append(checked_row(row))
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
    return checked


def checked_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Checks one row as in `checked_rows`. The error message names the field."""
    if not isinstance(row, Mapping):
        raise ValueError(f"it is a {type(row).__name__}; a row must be a mapping with 'prompt' and 'answer'")
    for name in ("prompt", "answer"):
        if name not in row:
            raise ValueError(f"no field {name!r}; its fields are {sorted(map(str, row))}")
    prompt, answer = row["prompt"], row["answer"]
    if not isinstance(prompt, str):
        checked_messages(prompt)
        prompt = list(prompt)  # messages are normalized later, when they are rendered
    elif re.match(r"""\s*\[\s*\{\s*["'](?:role|from)["']\s*:""", prompt):
        raise ValueError(
            f"'prompt' is a text that spells messages: {prompt!r:.60}; parse it, and store the list of messages"
        )
    # A bool is an int in Python, but is not converted, because "True" is hardly an intended answer.
    if isinstance(answer, int | np.integer) and not isinstance(answer, bool):
        answer = str(int(answer))
    if not isinstance(answer, str):
        raise ValueError(f"'answer' must be text or an integer; got {answer!r:.60} ({type(answer).__name__})")
    for name, value in (("prompt", prompt), ("answer", answer)):
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{name!r} is empty; remove the row or fill in the field")
    return {**row, "prompt": prompt, "answer": answer}


def place_of(row: Mapping[str, Any], index: int) -> str:
    """Returns a row's position for error messages: the position in its file, or its index if the row is not from a file."""
    place = row.get("source_row")
    return place if isinstance(place, str) else f"row {index}"
