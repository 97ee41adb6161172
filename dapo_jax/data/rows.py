"""The fields that every row must have: a prompt and an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.text.chat import Message
from dapo_jax.text.formatting import checked_messages


def checked_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows given from Python, each with a `prompt` and an `answer`; other fields are kept as they are.

    A prompt is a string, or a list of messages with a `role` and a `content` each. An integer answer is turned into its decimal text.

    Raises:
        ValueError: no rows, or a field that is missing, empty or of another type; names the row and the field.
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
    """One row, as `checked_rows`.

    Raises:
        ValueError: names the field.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"it is a {type(row).__name__}; a row is a mapping with 'prompt' and 'answer'")
    return {**row, "prompt": _prompt_field(row), "answer": _answer_field(row)}


def place_of(row: Mapping[str, Any], index: int) -> str:
    """Where a row comes from, for messages: its place in a file, or its number."""
    place = row.get("source_row")
    return place if isinstance(place, str) else f"row {index}"


def _prompt_field(row: Mapping[str, Any]) -> str | list[Message]:
    value = _field(row, "prompt")
    if isinstance(value, str):
        return _not_empty(value, "prompt")
    checked_messages(value)
    return list(value)  # as they were given: they are made canonical where they are rendered


def _answer_field(row: Mapping[str, Any]) -> str:
    value = _field(row, "answer")
    # bool is an int to Python, but True is no answer that anybody meant to write as "True".
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(int(value))
    if not isinstance(value, str):
        raise ValueError(
            f"'answer' must be a string or an integer; got {value!r:.60} ({type(value).__name__})"
        )
    return _not_empty(value, "answer")


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"no field {name!r}; its fields are {sorted(map(str, row))}")
    return row[name]


def _not_empty(value: str, name: str) -> str:
    if not value.strip():
        raise ValueError(f"{name!r} is empty; drop the row or fill the field")
    return value
