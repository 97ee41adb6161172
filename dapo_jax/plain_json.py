"""JSON that somebody else wrote: whatever is wrong with it is a ValueError that names the place."""

import json
from typing import Any


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
