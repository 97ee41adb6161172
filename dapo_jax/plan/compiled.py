"""Facts about one compiled program: memory, collectives, cost, its largest arrays, and why the compiler refused it."""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from dapo_jax.plan.collectives import Traffic, collectives
from dapo_jax.plan.hlo_text import Instruction, array_bytes, parsed, ran

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_VIEWS = [
    "parameter",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "while",
    "conditional",
    "constant",
    "after-all",
]
"""Instructions that allocate no array."""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**62
"""No operation takes so many cycles: the compiler writes the largest integer for an unknown cost."""
_KERNEL = 'custom_call_target="tpu_custom_call"'
_COPIED = re.compile(r"^\((\S+), (\S+),")
_FAST, _HOST = "S(1)", "S(5)"
"""Memory next to the cores, and the host's memory, in an array's type."""


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
class Cost:
    """The compiler's estimate for one run of a program."""

    cycles: int
    """The sum over all operations, one after another."""
    copied_bytes: int
    """Bytes that asynchronous copies read from the device's memory or write to it."""
    kernels: int
    """Number of kernel runs. Their cost is unknown to the compiler."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program, compiled for a slice."""

    name: str
    compile_s: float
    memory: ProgramMemory | None
    """None: the compiler refused the program, which does not fit a device even alone."""
    traffic: list[Traffic] = field(default_factory=list)
    cost: Cost | None = None
    refusal: str = ""
    largest: list[Allocation] = field(default_factory=list)
    """The largest arrays of its instructions; for a refused program the compiler's list, or its arguments."""


def compile_program(
    name: str, lower: Callable[[], Any], *, trips: Sequence[int], arguments: Callable[[str], list[Allocation]]
) -> Program:
    """Compiles a program and collects the facts about it.

    Args:
        name: of the program.
        lower: returns the lowered program.
        trips: see `hlo_text.ran`.
        arguments: program -> its largest arguments.
    """
    began = time.monotonic()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if (refusal := refused(error)) is None:
            raise
        message, largest = refusal
        largest, seconds = largest or arguments(name), time.monotonic() - began
        return Program(name=name, compile_s=seconds, memory=None, refusal=message, largest=largest)
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
        cost=cost_of(text, trips=trips),
        largest=largest_arrays(text),
    )


def cost_of(text: str, *, trips: Sequence[int] = ()) -> Cost:
    """Returns the cost of a program compiled for a TPU.

    The TPU compiler writes its estimate of cycles into each operation, with tiles and padding. The sums of `cost_analysis()` do not
    help: they count a loop once, an asynchronous copy several times, and a kernel as -1.

    Args:
        text: `compiled.as_text()`.
        trips: see `hlo_text.ran`.
    """
    cycles = copied = kernels = 0
    for one in ran(parsed(text), trips=trips, enters=lambda made: _cycles(made) is None):
        cycles += one.times * (_cycles(one.instruction) or 0)
        copied += one.times * _copied(one.instruction)
        kernels += one.times * (_KERNEL in one.instruction.rest)
    return Cost(cycles=cycles, copied_bytes=copied, kernels=kernels)


def refused(error: Exception) -> tuple[str, list[Allocation]] | None:
    """Returns the message and the largest arrays of a program that does not fit a device; None for another error.

    libtpu lists the arrays if it fails while it assigns buffers. If it fails before that it only gives their sum.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    listed = re.split(r"\n\s*\d+\. Size: ", text)[1:]
    return text.splitlines()[0], [_listed(entry) for entry in listed[:5]]


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
        if made is not None and not fused and made[2] not in _VIEWS:
            named = re.search(r'op_name="([^"]*)"', line)
            found[named[1] if named else made[2], made[1]] = array_bytes(made[1])
    ranked = sorted(found.items(), key=lambda item: -item[1])[:count]
    return [Allocation(bytes=size, shape=shape, operation=name) for (name, shape), size in ranked]


def _cycles(made: Instruction) -> int | None:
    found = _CYCLES.search(made.rest)
    return int(found[1]) if found and int(found[1]) < _UNKNOWN else None


def _copied(made: Instruction) -> int:
    """Returns the bytes of the device's memory that an asynchronous copy reads or writes."""
    if made.opcode != "copy-start" or (ends := _COPIED.match(made.type)) is None or _HOST in made.type:
        return 0
    return sum(array_bytes(end) for end in ends.groups() if _FAST not in end)


def _listed(entry: str) -> Allocation:
    """Parses one entry of the compiler's list."""
    size = re.match(r"([\d.]+)([KMGT]?)", entry)
    shape, name = re.search(r"Shape: (\S+)", entry), re.search(r'op_name="([^"]*)"', entry)
    return Allocation(
        bytes=_size(size[1], size[2]) if size else 0,
        shape=shape[1] if shape else "",
        operation=name[1] if name else "",
    )


def _size(number: str, unit: str) -> int:
    return math.ceil(float(number) * _UNITS[unit])
