"""A compiled program as its text: computations, their instructions, and how often each instruction runs.

A loop's body stands in the text once; what is in it runs as often as the loop does. A loop whose end is only known when
it runs (microbatches, decode steps) is given by the caller.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
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
class Module:
    """One program."""

    entry: str = ""
    devices: int = 1
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    roots: dict[str, Instruction] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """An instruction as it runs."""

    instruction: Instruction
    where: str
    """The computation that it stands in."""
    times: int


def parsed(text: str) -> Module:
    """The program that `compiled.as_text()` gives."""
    module, lines, name = Module(), [], ""
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
    module: Module,
    *,
    unknown_trips: Sequence[int] = (),
    enters: Callable[[Instruction], bool] = lambda instruction: True,
) -> Iterator[Ran]:
    """All instructions but those of control flow, with how often they run.

    Args:
        module: the program.
        unknown_trips: how often loops run whose number of trips is not in the text: of the outermost, of those inside it, and
            so on; 1 for what is not given.
        enters: whether the computations that an instruction calls are looked into.
    """
    yield from _walk(module, module.entry, 1, list(unknown_trips), enters)


def array_bytes(text: str) -> int:
    """Bytes of all arrays in a type such as `(f32[8,4]{1,0}, bf16[2])`."""
    return math.ceil(sum(_width(kind) * math.prod(map(int, filter(None, sizes.split(",")))) for kind, sizes in _ARRAY.findall(text)))  # fmt: skip


def _width(kind: str) -> int | float:
    if kind == "pred":
        return 1
    bits = re.match(r"[a-z]+(\d+)", kind)
    return int(bits[1]) / 8 if bits else 0


def _walk(
    module: Module, name: str, times: int, unknown: Sequence[int], enters: Callable[[Instruction], bool]
) -> Iterator[Ran]:
    for instruction in module.computations.get(name, []):
        opcode, rest = instruction.opcode, instruction.rest
        if opcode == "while":
            body, trips = _loop(module, name, instruction)
            inner = unknown if trips is not None else unknown[1:]
            repeated = trips if trips is not None else (unknown[0] if unknown else 1)
            yield from _walk(module, body, times * repeated, inner, enters)
            continue
        yield Ran(instruction, name, times)
        # The end of an asynchronous call names its computation again.
        if opcode not in ("async-update", "async-done") and enters(instruction):
            branches = [part for group in _BRANCHES.findall(rest) for part in re.split(r",\s*", group)]
            for called in (*_CALLED.findall(rest), *(branch.lstrip("%") for branch in branches)):
                yield from _walk(module, called, times, unknown, enters)


def _loop(module: Module, where: str, loop: Instruction) -> tuple[str, int | None]:
    """The body of a loop, and how often it runs if the text says so.

    On TPUs it says so in the condition: the counter is compared with a constant. It counts by 1, from a constant.
    """
    named = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.rest))
    if told := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return named["body"], int(told[1])
    root = module.roots.get(named["condition"])
    if root is None or root.opcode != "compare" or "direction=LT" not in root.rest:
        return named["body"], None
    inside = {made.name: made for made in module.computations[named["condition"]]}
    counter, bound = (inside.get(operand) for operand in _operands(root)[:2])
    limit = None if bound is None else _constant(bound)
    place = None if counter is None else re.search(r"index=(\d+)", counter.rest)
    if limit is None or place is None:
        return named["body"], None
    return named["body"], limit - _start(module, where, loop, int(place[1]))


def _start(module: Module, where: str, loop: Instruction, place: int) -> int:
    """Where a loop's counter begins: 0 unless its first value is another constant."""
    outside = {made.name: made for made in module.computations[where]}
    carried = outside.get(_operands(loop)[0])
    if carried is None or carried.opcode != "tuple":
        return 0
    first = outside.get(_operands(carried)[place])
    return (_constant(first) if first is not None else None) or 0


def _constant(made: Instruction) -> int | None:
    value = re.match(r"(-?\d+)\)", made.rest) if made.opcode == "constant" else None
    return int(value[1]) if value else None


def _operands(made: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", made.rest.split("),")[0])
