"""The collectives of a compiled program, read from its text: which kinds, how many, and how many bytes a device receives.

A loop's body stands in the text once; what is in it is counted as often as the loop runs. A loop whose end is only known when
it runs (microbatches, decode steps) is given by the caller.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "ragged-all-to-all"),
)

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind in one run of a program."""

    kind: str
    count: int
    """The number of runs."""
    received_bytes: int
    """By each device, over all of them."""


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    rest: str
    """Operands and attributes."""


@dataclass
class _Module:
    entry: str = ""
    devices: int = 1
    computations: dict[str, list[_Instruction]] = field(default_factory=dict)
    roots: dict[str, _Instruction] = field(default_factory=dict)


def collectives(text: str, *, unknown_trips: Sequence[int] = ()) -> list[Traffic]:
    """The collectives of a program, by kind.

    Received bytes are those of a ring: of an all-gather or all-to-all the share of the result that the others hold, of a
    reduce-scatter as much of what it sums, of an all-reduce both.

    Args:
        text: `compiled.as_text()`.
        unknown_trips: how often loops run whose number of trips is not in the text: of the outermost, of those inside it, and
            so on; 1 for what is not given.
    """
    module = _parsed(text)
    found: dict[str, list[int]] = {}
    _walk(module, module.entry, 1, list(unknown_trips), found)
    return [Traffic(kind=kind, count=found[kind][0], received_bytes=found[kind][1]) for kind in KINDS if kind in found]  # fmt: skip


def array_bytes(text: str) -> int:
    """Bytes of all arrays in a type such as `(f32[8,4]{1,0}, bf16[2])`."""
    return math.ceil(sum(_width(kind) * math.prod(map(int, filter(None, sizes.split(",")))) for kind, sizes in _ARRAY.findall(text)))  # fmt: skip


def _width(kind: str) -> int | float:
    if kind == "pred":
        return 1
    bits = re.match(r"[a-z]+(\d+)", kind)
    return int(bits[1]) / 8 if bits else 0


def _parsed(text: str) -> _Module:
    module, lines, name = _Module(), [], ""
    for count in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0]):
        module.devices *= int(count)
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = module.computations.setdefault(head[2], [])
            module.entry, name = (head[2] if head[1] else module.entry), head[2]
        elif found := _INSTRUCTION.match(line):
            lines.append(_Instruction(*found.groups()[1:]))
            if found[1]:
                module.roots[name] = lines[-1]
    return module


def _walk(
    module: _Module, name: str, times: int, unknown: Sequence[int], found: dict[str, list[int]]
) -> None:
    for instruction in module.computations.get(name, []):
        opcode, rest = instruction.opcode, instruction.rest
        if opcode == "while":
            body, trips = _loop(module, name, instruction)
            inner = unknown if trips is not None else unknown[1:]
            repeated = trips if trips is not None else (unknown[0] if unknown else 1)
            _walk(module, body, times * repeated, inner, found)
        elif (kind := opcode.removesuffix("-start")) in KINDS:
            kind, received = _received(module, name, kind, instruction)
            if received:
                total = found.setdefault(kind, [0, 0])
                total[0], total[1] = total[0] + times, total[1] + times * received
        # The end of an asynchronous call names its computation again.
        elif opcode not in ("async-update", "async-done"):
            branches = [part for group in _BRANCHES.findall(rest) for part in re.split(r",\s*", group)]
            for called in (*_CALLED.findall(rest), *(branch.lstrip("%") for branch in branches)):
                _walk(module, called, times, unknown, found)


def _loop(module: _Module, where: str, loop: _Instruction) -> tuple[str, int | None]:
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


def _start(module: _Module, where: str, loop: _Instruction, place: int) -> int:
    """Where a loop's counter begins: 0 unless its first value is another constant."""
    outside = {made.name: made for made in module.computations[where]}
    carried = outside.get(_operands(loop)[0])
    if carried is None or carried.opcode != "tuple":
        return 0
    first = outside.get(_operands(carried)[place])
    return (_constant(first) if first is not None else None) or 0


def _constant(made: _Instruction) -> int | None:
    value = re.match(r"(-?\d+)\)", made.rest) if made.opcode == "constant" else None
    return int(value[1]) if value else None


def _operands(made: _Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", made.rest.split("),")[0])


def _received(module: _Module, where: str, kind: str, instruction: _Instruction) -> tuple[str, int]:
    """The kind by what it does, and the bytes that one device receives."""
    size, group = array_bytes(instruction.type), _group(instruction.rest, module.devices)
    started = instruction.opcode.endswith("-start")
    if group == 1:
        return kind, 0
    if kind == "collective-permute":
        return kind, size // 2 if started else size
    if kind == "all-gather" and started:  # its type has the operand beside the result
        size = size * group // (group + 1)
    if kind == "reduce-scatter":
        return kind, size * (group - 1)
    # On TPUs a reduce-scatter is an all-reduce of which each device keeps its part, in a fusion of that name.
    if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
        return "reduce-scatter", size * (group - 1) // group
    return kind, (2 if kind == "all-reduce" else 1) * size * (group - 1) // group


def _group(rest: str, devices: int) -> int:
    """Devices in one group of a collective, in any of the notations; without groups, all."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(shaped[2])
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", meshed[1])}
        return math.prod(_axis(part, sizes) for part in re.findall(r"'[^']+'(?::\(\d+\)\d+)?", meshed[2]))
    return devices


def _axis(part: str, sizes: Mapping[str, int]) -> int:
    """An axis of the mesh, or a part of one: 'x', or 'x':(2)4 for its middle 4."""
    name, _, cut = part.partition(":")
    return int(cut.split(")")[1]) if cut else sizes[name.strip("'")]
