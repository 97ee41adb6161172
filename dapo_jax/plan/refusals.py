"""The arrays that take the memory: the compiler's own list when it refuses a program, else the largest arrays in a program's text."""

import math
import re
from dataclasses import dataclass

from dapo_jax.plan.hlo_text import array_bytes

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FREE = (
    "parameter",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "while",
    "conditional",
    "constant",
    "after-all",
)
"""Instructions that make no array of their own."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One array on a device."""

    bytes: int
    shape: str
    operation: str
    """The operation of the program that makes it."""


def refused(error: Exception) -> tuple[str, list[Allocation]] | None:
    """The message and the largest allocations of a program that does not fit a device; None for another error.

    libtpu lists allocations when it fails while assigning buffers; when it fails before that it only gives the sum.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    listed = re.split(r"\n\s*\d+\. Size: ", text)[1:]
    return text.splitlines()[0], [_listed(entry) for entry in listed[:5]]


def of_scalars(message: str) -> bool:
    """True where it is not the device's memory that is full but the small one that a kernel has its page tables in."""
    return "memory space smem" in message


def needed_bytes(message: str) -> int | None:
    """The bytes that a refused program needs, by either form of the message."""
    told = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds", message) or re.search(
        r"Used ([\d.]+)([KMGT]?) of", message
    )
    return _size(told[1], told[2]) if told else None


def largest_arrays(text: str, count: int = 5) -> list[Allocation]:
    """The largest arrays that a compiled program makes outside of fusions, one for each operation and shape."""
    found: dict[tuple[str, str], int] = {}
    fused = False
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            fused = "fused_computation" in line.split(" ", 1)[0]
        made = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ([a-z]\w*\[[\d,]*\])\S* ([a-z][a-z\-]*)\(", line)
        if made is None or fused or made[2] in _FREE:
            continue
        named = re.search(r'op_name="([^"]*)"', line)
        key = (named[1] if named else made[2], made[1])
        found[key] = array_bytes(made[1])
    ranked = sorted(found.items(), key=lambda item: -item[1])[:count]
    return [Allocation(bytes=size, shape=shape, operation=name) for (name, shape), size in ranked]


def _listed(entry: str) -> Allocation:
    size = re.match(r"([\d.]+)([KMGT]?)", entry)
    shape = re.search(r"Shape: (\S+)", entry)
    name = re.search(r'op_name="([^"]*)"', entry)
    return Allocation(
        bytes=_size(size[1], size[2]) if size else 0,
        shape=shape[1] if shape else "",
        operation=name[1] if name else "",
    )


def _size(number: str, unit: str) -> int:
    return math.ceil(float(number) * _UNITS[unit])
