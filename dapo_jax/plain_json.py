"""JSON that somebody else wrote: whatever is wrong with it is a ValueError that names the place."""

import json
import math
from typing import Any


def read_numbers(text: str | bytes) -> Any:
    """The value that JSON states, if all its numbers are finite and its integers fit 64 bits: arrays and JavaScript hold no others.

    Raises:
        ValueError: it is no JSON, or a number is another.
    """
    return json.loads(text, parse_int=integer, parse_float=_finite, parse_constant=_finite)


def integer(digits: str) -> int:
    """An integer of JSON, for `json.loads(parse_int=)`.

    Raises:
        ValueError: it does not fit 64 bits.
    """
    number = int(digits)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"an integer of {len(digits)} digits does not fit 64 bits")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text:.20} is not finite")
    return number


def read_object(content: bytes, where: object) -> dict[str, Any]:
    """The JSON object that `content` holds.

    Args:
        content: a file's bytes, UTF-8 with or without a byte order mark.
        where: they are from, for the message.

    Raises:
        ValueError: it is no UTF-8, no JSON or no object, or more deeply nested than Python can follow.
    """
    try:
        read = json.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError(f"{where} is not a JSON file: too many brackets inside one another") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of thousands of digits
        raise ValueError(f"{where} is not a JSON file: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{where} holds a {type(read).__name__}; it must be an object with named values")
    return read
