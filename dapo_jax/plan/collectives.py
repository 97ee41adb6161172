"""The collectives of a compiled program, read from its text: which kinds, how many, and how many bytes a device receives."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapo_jax.plan.hlo_text import Instruction, Module, Ran, array_bytes, parsed, ran

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "ragged-all-to-all"),
)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind in one run of a program."""

    kind: str
    count: int
    """The number of runs."""
    received_bytes: int
    """By each device, over all of them."""


def collectives(text: str, *, unknown_trips: Sequence[int] = ()) -> list[Traffic]:
    """The collectives of a program, by kind.

    Received bytes are those of a ring: of an all-gather or all-to-all the share of the result that the others hold, of a
    reduce-scatter as much of what it sums, of an all-reduce both.

    Args:
        text: `compiled.as_text()`.
        unknown_trips: as `hlo_text.ran` takes them.
    """
    module = parsed(text)
    found: dict[str, list[int]] = {}
    for one in ran(module, unknown_trips=unknown_trips, enters=lambda made: _kind(made) is None):
        kind, received = _received(module, one)
        if received:
            total = found.setdefault(kind, [0, 0])
            total[0], total[1] = total[0] + one.times, total[1] + one.times * received
    return [Traffic(kind=kind, count=found[kind][0], received_bytes=found[kind][1]) for kind in KINDS if kind in found]  # fmt: skip


def _kind(made: Instruction) -> str | None:
    """The kind of collective that an instruction names; None if it is none."""
    kind = made.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _received(module: Module, one: Ran) -> tuple[str, int]:
    """The kind by what it does, and the bytes that one device receives; none where the instruction is no collective."""
    instruction, where, kind = one.instruction, one.where, _kind(one.instruction)
    if kind is None:
        return "", 0
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
