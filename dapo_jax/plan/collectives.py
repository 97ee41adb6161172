"""The collectives of a compiled program: their kinds, their number, and the bytes that a device receives."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dapo_jax.plan.hlo_text import HloModule, Instruction, Ran, array_bytes, parsed, ran

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "ragged-all-to-all"),
)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind in one run of a program."""

    kind: str
    count: int
    received_bytes: int
    """Bytes that each device receives in all of them."""


def collectives(text: str, *, trips: Sequence[int] = ()) -> list[Traffic]:
    """Returns the collectives of a program by kind.

    The received bytes are those of a ring algorithm. An all-gather or all-to-all receives the other devices' share of the result, a
    reduce-scatter as much of its operand, an all-reduce both.

    Args:
        text: `compiled.as_text()`.
        trips: see `hlo_text.ran`.
    """
    module = parsed(text)
    found: dict[str, list[int]] = {}
    for one in ran(module, trips=trips, enters=lambda made: _kind(made) is None):
        kind, received = _received(module, one)
        if received:
            total = found.setdefault(kind, [0, 0])
            total[0], total[1] = total[0] + one.times, total[1] + one.times * received
    return [Traffic(kind=kind, count=found[kind][0], received_bytes=found[kind][1]) for kind in KINDS if kind in found]  # fmt: skip


def _kind(made: Instruction) -> str | None:
    kind = made.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _received(module: HloModule, one: Ran) -> tuple[str, int]:
    """Returns the kind of a collective and the bytes that one device receives; 0 bytes for other instructions."""
    made, kind = one.instruction, _kind(one.instruction)
    if kind is None or (group := _group(made.rest, module.devices)) == 1:
        return "", 0
    size, started = array_bytes(made.type), made.opcode.endswith("-start")
    if kind == "collective-permute":
        return kind, size // 2 if started else size
    if kind == "all-gather" and started:  # its type holds the operand and the result
        size = size * group // (group + 1)
    if kind == "reduce-scatter":
        return kind, size * (group - 1)
    # TPU programs write a reduce-scatter as an all-reduce in a fusion of this name; each device keeps its part.
    if kind == "all-reduce" and one.where.startswith("all-reduce-scatter"):
        return "reduce-scatter", size * (group - 1) // group
    return kind, (2 if kind == "all-reduce" else 1) * size * (group - 1) // group


def _group(rest: str, devices: int) -> int:
    """Returns the number of devices in one group of a collective, in any of its notations; all devices without groups."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(shaped[2])
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        # An axis of the mesh, 'x', or a part of one: 'x':(2)4 is the middle 4 of its devices.
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", meshed[1])}
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", meshed[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    return devices
