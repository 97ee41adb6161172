"""JSON from others: every problem with it is a ValueError that names the place."""

import json
import math
from typing import Any


def read_numbers(text: str | bytes) -> Any:
    """Parses JSON whose numbers are finite and whose integers fit 64 bits, as in arrays and JavaScript.

    Raises:
        ValueError: it is not JSON, or contains another number.
    """
    return json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)


def _integer(digits: str) -> int:
    number = int(digits)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"an integer of {len(digits)} digits does not fit 64 bits")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text:.20} is not finite")
    return number


def read_object(content: bytes, where: object) -> dict[str, Any]:
    """Parses a JSON object.

    Args:
        content: a file's bytes, UTF-8 with or without a byte order mark.
        where: the file, for the message.

    Raises:
        ValueError: it is not UTF-8, not JSON, or not an object.
    """
    try:
        read = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{where} is not a JSON file: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{where} holds a {type(read).__name__}; it must be an object with named values")
    return read
