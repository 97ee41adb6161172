"""Compares the output of a program with the expected output. Both may be hostile, so every comparison is bounded."""

import json
import math
import re
from typing import Any

from dapo_jax.sandbox.server import DEEPEST

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_LONGEST = 400
"""Numbers with more characters are compared as text."""
TOLERANCE = 1e-6


def same_text(expected: str, found: str, compare: str = "lines") -> bool:
    """Returns whether two outputs are equal: by the tokens of each line (`lines`), by all tokens (`tokens`), or by every character (`exact`).

    Tokens are equal as text, as integers, or within 1e-6 (absolute or relative) if the expected token is a decimal. White space around the output and
    its lines does not count.

    >>> same_text("0.5 07", "\\n0.5000001 7 \\n"), same_text("1 2", "1\\n2"), same_text("1 2", "1\\n2", "tokens")
    (True, False, True)
    """
    if compare == "exact":
        return expected == found
    wanted, given = (
        [line.split() for line in (text.strip().split("\n") if compare == "lines" else [text])]
        for text in (expected, found)
    )
    return [*map(len, wanted)] == [*map(len, given)] and all(
        _same_token(token, other)
        for tokens, others in zip(wanted, given, strict=True)
        for token, other in zip(tokens, others, strict=True)
    )


def _same_token(expected: str, found: str) -> bool:
    if expected == found:
        return True
    if not all(len(text) <= _LONGEST and _NUMBER.fullmatch(text) for text in (expected, found)):
        return False
    wanted, given = (int(text) if _INTEGER.fullmatch(text) else float(text) for text in (expected, found))
    return _same_number(wanted, given, TOLERANCE)


def _same_number(expected: int | float, found: int | float, tolerance: float) -> bool:
    if isinstance(expected, int):
        return expected == found and (isinstance(found, int) or abs(expected) < 2**53)
    try:
        close = math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False
    return close or (expected != expected and found != found)


def same_result(compare: str, given: Any, expected: Any, found: Any, tolerance: float = TOLERANCE) -> bool:
    """Returns whether the `packed` value of a function is right. Apart from `same_value`, EvalPlus compares sequences as sets (`set`), only whether there is a value
    (`found`), or whether a polynomial with the given coefficients is zero at the value (`zero`)."""
    try:
        if compare == "set":
            wanted, other = ({_key(item) for item in _items(value)[1]} for value in (expected, found))
            return wanted == other
        if compare == "zero":
            return abs(sum(factor * found**power for power, factor in enumerate(given[0]))) <= tolerance
    except (TypeError, ValueError, ArithmeticError, RecursionError):  # a program forged it
        return False
    if compare == "found":
        return (expected is not None) == (found if isinstance(found, bool) else found is not None)
    return same_value(expected, found, tolerance)


def _key(value: Any) -> str:
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def same_value(expected: Any, found: Any, tolerance: float = TOLERANCE, depth: int = 0) -> bool:
    """Returns whether two `packed` values are equal. Tuples equal lists, and keys of dictionaries are compared as text, because JSON has no others."""
    if isinstance(expected, bool | str | None) or isinstance(found, bool | str | None):
        return type(expected) is type(found) and expected == found
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return _same_number(expected, found, tolerance)
    try:
        (kind, wanted), (other_kind, given) = _items(expected), _items(found)
    except (TypeError, ValueError, RecursionError):  # a program forged it
        return False
    if kind != other_kind or depth > DEEPEST or len(wanted) != len(given):
        return False
    if kind in ("literal", "opaque"):
        return kind == "literal" and wanted == given
    return all(same_value(a, b, tolerance, depth + 1) for a, b in zip(wanted, given, strict=True))


def _items(value: Any) -> tuple[str, Any]:
    """Returns the kind of a value, and its items, sorted if it is a set or a dictionary. Raises TypeError or ValueError if it is no packed value."""
    [(kind, items)] = value.items() if isinstance(value, dict) else [("list", value)]
    if not isinstance(items, list | str):
        raise TypeError(f"{kind} of {type(items).__name__}")
    if kind == "dict":
        pairs = {key if isinstance(key, str) else json.dumps(key): item for key, item in items}
        return kind, [[key, pairs[key]] for key in sorted(pairs)]
    if kind in ("set", "frozenset"):
        return "set", sorted(items, key=json.dumps)
    return ("list" if kind == "tuple" else kind), items
