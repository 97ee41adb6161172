"""Facts about one compiled program: memory, collectives, its largest arrays, and why the compiler refused it."""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from dapo_jax.plan.collectives import Traffic, array_bytes, collectives

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_VIEWS = re.compile("parameter|get-tuple-element|bitcast|tuple|while|conditional|constant|after-all")
"""Instructions that allocate no array."""


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Bytes of a program's buffers on one device."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that reuse the memory of donated arguments."""
    temporaries: int
    code: int

    @property
    def needed(self) -> int:
        """All of the program's bytes."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def added(self) -> int:
        """Bytes that the program needs in addition to its arguments and its code."""
        return self.needed - self.arguments - self.code

    @property
    def kept(self) -> int:
        """Bytes of the arguments that are not donated."""
        return self.arguments - self.aliased


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One array on a device."""

    bytes: int
    shape: str
    operation: str
    """The operation that makes it."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program, compiled for a slice."""

    name: str
    compile_s: float
    memory: ProgramMemory | None
    """None: the compiler refused the program, which does not fit a device even alone."""
    traffic: list[Traffic] = field(default_factory=list)
    refusal: str = ""
    largest: list[Allocation] = field(default_factory=list)
    """The largest arrays of its instructions; for a refused program the compiler's list, which may be missing."""


def compile_program(name: str, lower: Callable[[], Any], *, trips: Sequence[int]) -> Program:
    """Compiles the program that `lower` returns and collects the facts about it; `trips` as in `collectives`."""
    began = time.monotonic()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if (refusal := refused(error)) is None:
            raise
        message, largest = refusal
        return Program(
            name=name, compile_s=time.monotonic() - began, memory=None, refusal=message, largest=largest
        )
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return Program(
        name=name,
        compile_s=time.monotonic() - began,
        memory=ProgramMemory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
        ),
        traffic=collectives(text, trips=trips),
        largest=largest_arrays(text),
    )


def refused(error: Exception) -> tuple[str, list[Allocation]] | None:
    """Returns the message and the largest arrays of a program that does not fit a device; None for another error.

    libtpu lists the arrays if it fails while it assigns buffers. If it fails before that it only gives their sum.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    largest = []
    for entry in re.split(r"\n\s*\d+\. Size: ", text)[1:6]:
        size = re.match(r"([\d.]+)([KMGT]?)", entry)
        shape, name = re.search(r"Shape: (\S+)", entry), re.search(r'op_name="([^"]*)"', entry)
        largest.append(
            Allocation(
                bytes=_size(size[1], size[2]) if size else 0,
                shape=shape[1] if shape else "",
                operation=name[1] if name else "",
            )
        )
    return text.splitlines()[0], largest


def of_scalars(message: str) -> bool:
    """Returns True if the full memory is the small one in which a kernel has its page tables."""
    return "memory space smem" in message


def needed_bytes(message: str) -> int | None:
    """Returns the bytes that a refused program needs, from either form of the message; None if it holds no number."""
    found = re.search(r"(?:\(|Used )([\d.]+)([KMGT]?)(?:\) exceeds| of)", message)
    return _size(found[1], found[2]) if found else None


def largest_arrays(text: str, count: int = 5) -> list[Allocation]:
    """Returns the largest arrays that a compiled program makes outside of fusions, one per operation and shape."""
    found: dict[tuple[str, str], int] = {}
    fused = False
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            fused = "fused_computation" in line.split(" ", 1)[0]
        made = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ([a-z]\w*\[[\d,]*\])\S* ([a-z][a-z\-]*)\(", line)
        if made is not None and not fused and not _VIEWS.fullmatch(made[2]):
            named = re.search(r'op_name="([^"]*)"', line)
            found[named[1] if named else made[2], made[1]] = array_bytes(made[1])
    ranked = sorted(found.items(), key=lambda item: -item[1])[:count]
    return [Allocation(bytes=size, shape=shape, operation=name) for (name, shape), size in ranked]


def _size(number: str, unit: str) -> int:
    return math.ceil(float(number) * _UNITS[unit])
