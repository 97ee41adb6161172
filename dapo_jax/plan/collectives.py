"""Counts the collectives in a compiled program by kind, and the bytes that each device receives in them.

The counts come from the program's HLO text. It contains a loop body only once, so the body's collectives are multiplied by the
loop's trip count. The caller supplies trip counts that depend on the data, such as the number of microbatches or decode steps.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "ragged-all-to-all"),
)

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(?:(pred)|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind in one execution of a program."""

    kind: str
    count: int
    received_bytes: int
    """Total bytes that each device receives."""
    network_bytes: int = 0
    """The part of `received_bytes` that a device receives from other machines, over its own connection to the network."""


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction."""

    root: bool
    type: str
    opcode: str
    rest: str
    """Operands and attributes, as text."""

    @property
    def kind(self) -> str:
        """The kind of collective, or an empty string if the instruction is not a collective."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else ""

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split("),")[0])


Computations: TypeAlias = dict[str, dict[str, Instruction]]


def collectives(text: str, *, trips: Sequence[int] = (), per_machine: int = 0) -> list[Traffic]:
    """Returns the collectives of a program, one entry per kind.

    Received bytes assume a ring algorithm. In a group of n devices, each device receives (n - 1)/n of the result of an all-gather or
    all-to-all, (n - 1)/n of the operand of a reduce-scatter, and 2 (n - 1)/n of the array in an all-reduce.

    `text` is `compiled.as_text()`. `trips` lists the trip counts that the text does not contain, outermost loop first; the default is 1.
    `per_machine` consecutive devices are on one machine, and machines are connected by a network. 0: there is no such network. The
    devices of a group on one machine each receive an equal part of the bytes from other machines, and exchange these parts over their links.
    """
    head = text.partition("\n")[0]
    devices = math.prod(map(int, re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)))
    counts, total, network = Counter[str](), Counter[str](), Counter[str]()
    for instruction, where, times in _walk(*_parsed(text), 1, trips):
        kind, received = _received(instruction, where, devices)
        if received:
            counts[kind] += times
            total[kind] += times * received
            network[kind] += int(times * received * _network_share(instruction, devices, per_machine))
    return [
        Traffic(kind=kind, count=counts[kind], received_bytes=total[kind], network_bytes=network[kind])
        for kind in KINDS
        if kind in counts
    ]


def array_bytes(text: str) -> int:
    """Returns the total bytes of all arrays in an HLO type such as `(f32[8,4]{1,0}, bf16[2])`."""
    bits = 0
    for boolean, width, sizes in _ARRAY.findall(text):
        bits += (8 if boolean else int(width)) * math.prod(map(int, filter(None, sizes.split(","))))
    return math.ceil(bits / 8)


def _received(instruction: Instruction, where: str, devices: int) -> tuple[str, int]:
    """Returns the kind of a collective and the bytes that each device receives in it, or "" and 0 if nothing is exchanged."""
    kind = instruction.kind
    if not kind or (group := len(_group(instruction.rest, devices))) == 1:
        return "", 0
    size, started = array_bytes(instruction.type), instruction.opcode.endswith("-start")
    # The type of an asynchronous collective lists the operand and the result, except for an all-reduce.
    if started and kind == "all-gather":
        size = size * group // (group + 1)
    elif started and kind == "reduce-scatter":
        size //= group + 1
    elif started and kind != "all-reduce":
        size //= 2
    if kind == "collective-permute":
        return kind, size
    if kind == "reduce-scatter":
        return kind, size * (group - 1)
    # In TPU programs, a reduce-scatter is an all-reduce in a fusion with this name, and each device keeps only its part.
    if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
        return "reduce-scatter", size * (group - 1) // group
    return kind, (2 if kind == "all-reduce" else 1) * size * (group - 1) // group


def _network_share(instruction: Instruction, devices: int, per_machine: int) -> float:
    """Returns the fraction of a collective's received bytes that a device receives over the network."""
    if not per_machine:
        return 0.0
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", instruction.rest):
        ends = re.findall(r"(\d+),(\d+)", pairs[1])
        return float(any(int(one) // per_machine != int(other) // per_machine for one, other in ends))
    group = _group(instruction.rest, devices)
    together = min(Counter(device // per_machine for device in group).values())
    share = (len(group) - together) / (len(group) - 1)
    return share if instruction.kind.endswith("all-to-all") else share / together


def _group(rest: str, devices: int) -> list[int]:
    """Returns the devices of the first replica group, which may be written in any HLO notation. If the text lists no groups, all devices form one group."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return [int(device) for device in listed[1].split(",")]
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return _transposed(shaped[2], shaped[3])[: int(shaped[1])]
    meshed = (
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}"
    )
    if meshed_group := re.search(meshed, rest):
        strides, stride, group = dict[str, tuple[int, int]](), 1, [0]
        for name, size in reversed(re.findall(r"'([^']+)'=(\d+)", meshed_group[1])):
            strides[name], stride = (stride, int(size)), stride * int(size)
        # 'x' is a mesh axis. 'x':(2)4 is its sub-axis of size 4, after sub-axes with a total size of 2.
        for name, before, width in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", meshed_group[4]):
            step, size = strides[name]
            count = int(width or size)
            step *= size // (int(before or 1) * count)
            group = [device + step * index for device in group for index in range(count)]
        order = _transposed(meshed_group[2] or str(stride), meshed_group[3])
        return [order[device] for device in group]
    return list(range(devices))


def _transposed(sizes: str, axes: str | None) -> list[int]:
    """Numbers the places of a grid from 0, permutes the grid's axes, and returns the numbers in the new order. Sizes and axes are HLO text."""
    grid = np.arange(math.prod(shape := [int(size) for size in sizes.split(",")])).reshape(shape)
    return grid.transpose([int(axis) for axis in axes.split(",")] if axes else None).reshape(-1).tolist()


def _parsed(text: str) -> tuple[Computations, str]:
    """Returns the instructions of each computation by name, and the name of the entry computation."""
    computations, current, entry = Computations(), dict[str, Instruction](), ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif matched := _INSTRUCTION.match(line):
            root, name, *fields = matched.groups()
            current[name] = Instruction(bool(root), *fields)
    return computations, entry


def _walk(
    computations: Computations, name: str, times: int, trips: Sequence[int]
) -> Iterator[tuple[Instruction, str, int]]:
    """Yields each instruction except loops, with the name of its computation and the number of times that it is executed."""
    for instruction in computations.get(name, {}).values():
        if instruction.opcode == "while":
            body, known = _loop(computations, name, instruction)
            count = known if known is not None else (trips[0] if trips else 1)
            yield from _walk(computations, body, times * count, trips if known is not None else trips[1:])
            continue
        yield instruction, name, times
        # The update and done instructions of an asynchronous call name the called computation again, so they are skipped.
        if instruction.opcode not in ("async-update", "async-done") and not instruction.kind:
            branches = re.split(r",\s*", ", ".join(_BRANCHES.findall(instruction.rest)))
            for called in (*_CALLED.findall(instruction.rest), *(branch.lstrip("%") for branch in branches)):
                yield from _walk(computations, called, times, trips)


def _loop(computations: Computations, where: str, loop: Instruction) -> tuple[str, int | None]:
    """Returns the name of a loop's body and the loop's trip count, or None for a count that the text does not contain.

    In TPU programs, the count follows from the loop condition, which compares a counter with a constant. The counter increases by 1 per
    trip, and starts at 0 or at a constant in the loop's operand.
    """
    named = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.rest))
    body, inside, outside = named["body"], computations[named["condition"]], computations[where]
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return body, int(known[1])
    root = next((instruction for instruction in inside.values() if instruction.root), None)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.rest:
        return body, None
    counter, bound = (inside.get(operand) for operand in root.operands[:2])
    limit, index = _constant(bound), re.search(r"index=(\d+)", counter.rest if counter else "")
    if limit is None or index is None:
        return body, None
    carried = outside.get(loop.operands[0])
    if carried is None or carried.opcode != "tuple":
        return body, limit
    return body, limit - (_constant(outside.get(carried.operands[int(index[1])])) or 0)


def _constant(instruction: Instruction | None) -> int | None:
    value = (
        re.match(r"(-?\d+)\)", instruction.rest)
        if instruction is not None and instruction.opcode == "constant"
        else None
    )
    return int(value[1]) if value else None
