"""Reads the text of a compiled program: its computations, their instructions, and how often each instruction runs.

The text holds the body of a loop once; its instructions run once per trip. The caller gives the number of trips of loops that depend on
the data, such as those over microbatches or decode steps.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(?:(pred)|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    name: str
    type: str
    opcode: str
    rest: str
    """Operands and attributes."""


@dataclass
class HloModule:
    """One program."""

    entry: str = ""
    devices: int = 1
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    roots: dict[str, Instruction] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """An instruction with the number of times it runs."""

    instruction: Instruction
    where: str
    """The computation that contains it."""
    times: int


def parsed(text: str) -> HloModule:
    """Parses the text that `compiled.as_text()` returns."""
    module, lines, name = HloModule(), list[Instruction](), ""
    for count in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0]):
        module.devices *= int(count)
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = module.computations.setdefault(head[2], [])
            module.entry, name = (head[2] if head[1] else module.entry), head[2]
        elif found := _INSTRUCTION.match(line):
            lines.append(Instruction(*found.groups()[1:]))
            if found[1]:
                module.roots[name] = lines[-1]
    return module


def ran(
    module: HloModule, *, trips: Sequence[int] = (), enters: Callable[[Instruction], bool] = lambda made: True
) -> Iterator[Ran]:
    """Yields all instructions except control flow, with the number of times each runs.

    Args:
        module: the program.
        trips: number of trips of the loops whose number is not in the text: the outermost first, then those inside it. Default 1.
        enters: returns whether to yield the instructions of the computations that an instruction calls.
    """
    yield from _walk(module, module.entry, 1, trips, enters)


def array_bytes(text: str) -> int:
    """Returns the bytes of all arrays in a type such as `(f32[8,4]{1,0}, bf16[2])`."""
    bits = 0
    for boolean, width, sizes in _ARRAY.findall(text):
        bits += (8 if boolean else int(width)) * math.prod(map(int, filter(None, sizes.split(","))))
    return math.ceil(bits / 8)


def _walk(
    module: HloModule, name: str, times: int, trips: Sequence[int], enters: Callable[[Instruction], bool]
) -> Iterator[Ran]:
    for instruction in module.computations.get(name, []):
        opcode, rest = instruction.opcode, instruction.rest
        if opcode == "while":
            body, known = _loop(module, name, instruction)
            count = known if known is not None else (trips[0] if trips else 1)
            yield from _walk(module, body, times * count, trips if known is not None else trips[1:], enters)
            continue
        yield Ran(instruction, name, times)
        # The end of an asynchronous call names its computation a second time.
        if opcode not in ("async-update", "async-done") and enters(instruction):
            branches = [part for group in _BRANCHES.findall(rest) for part in re.split(r",\s*", group)]
            for called in (*_CALLED.findall(rest), *(branch.lstrip("%") for branch in branches)):
                yield from _walk(module, called, times, trips, enters)


def _loop(module: HloModule, where: str, loop: Instruction) -> tuple[str, int | None]:
    """Returns the body of a loop and its number of trips, None if the text does not hold it.

    TPU programs hold it in the condition, which compares a counter with a constant. The counter grows by 1.
    """
    named = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.rest))
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return named["body"], int(known[1])
    root = module.roots.get(named["condition"])
    if root is None or root.opcode != "compare" or "direction=LT" not in root.rest:
        return named["body"], None
    inside = {made.name: made for made in module.computations[named["condition"]]}
    counter, bound = (inside.get(operand) for operand in _operands(root)[:2])
    limit, index = _constant(bound), re.search(r"index=(\d+)", counter.rest if counter else "")
    if limit is None or index is None:
        return named["body"], None
    return named["body"], limit - _start(module, where, loop, int(index[1]))


def _start(module: HloModule, where: str, loop: Instruction, index: int) -> int:
    """Returns the first value of a loop's counter: a constant of the loop's operand, else 0."""
    outside = {made.name: made for made in module.computations[where]}
    carried = outside.get(_operands(loop)[0])
    if carried is None or carried.opcode != "tuple":
        return 0
    return _constant(outside.get(_operands(carried)[index])) or 0


def _constant(made: Instruction | None) -> int | None:
    value = re.match(r"(-?\d+)\)", made.rest) if made is not None and made.opcode == "constant" else None
    return int(value[1]) if value else None


def _operands(made: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", made.rest.split("),")[0])
