"""Parses JSON from other programs or from a model. All errors are ValueErrors."""

import json
import math
from typing import Any


def read_numbers(text: str | bytes) -> Any:
    """Parses JSON in which every number is finite and every integer fits in 64 bits. Raises ValueError for any other text."""
    return json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)


def _integer(digits: str) -> int:
    number = int(digits)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"an integer of {len(digits)} digits does not fit in 64 bits")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text:.20} is not finite")
    return number


def read_object(content: bytes, where: object) -> dict[str, Any]:
    """Parses the content of a UTF-8 file, with or without a byte order mark. Raises ValueError with the name `where` if it is not a JSON object."""
    try:
        read = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:  # also JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{where} is not a JSON file: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{where} contains a {type(read).__name__}; it must contain a JSON object")
    return read
