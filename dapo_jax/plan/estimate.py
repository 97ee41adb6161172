"""XLA's own estimate of a step's phases, beside the roofline: operation after operation, as the compiler's cost model has them.

The TPU compiler writes into a program how many cycles it expects of each operation, tiles and padding included. These are added up, as often as
the operation runs, with what is copied between the device's memories meanwhile. Of a kernel (Mosaic) the compiler knows no cost: the
roofline's share of it is added instead. The sums of `compiled.cost_analysis()` are of no use for this, since a loop counts once in them,
an asynchronous copy several times, and a kernel as -1; they are kept beside the estimate (`Cost.told`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapo_jax.plan.chips import Chip
from dapo_jax.plan.hlo_text import Instruction, array_bytes, parsed, ran
from dapo_jax.plan.roofline import Work, bound

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**62
"""Cycles that no operation takes: the compiler writes the largest integer where it has no estimate."""
_KERNEL = 'custom_call_target="tpu_custom_call"'
_COPIED = re.compile(r"^\((\S+), (\S+),")
_FAST, _HOST = "S(1)", "S(5)"
"""Memory beside the cores, and that of the host, in an array's type."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one run of a program, as its compiler states it."""

    cycles: int
    """The sum over all operations, one after another."""
    copied_bytes: int
    """Read from or written to the device's memory by asynchronous copies."""
    kernels: int
    """Runs of kernels, of which no cost is known."""
    told: Mapping[str, float]
    """From `cost_analysis()`: flops, bytes accessed and optimal_seconds, loops counted once; negative where a part is not known."""


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """XLA's estimate of one phase in a step."""

    phase: str
    operations_s: float
    copies_s: float
    kernels_s: float
    """By the roofline."""
    ici_s: float

    @property
    def seconds(self) -> float:
        """The sum, as if nothing on the device overlapped; and no less than what it receives takes."""
        return max(self.operations_s + self.copies_s + self.kernels_s, self.ici_s)


def cost_of(text: str, told: Mapping[str, float] | None, *, unknown_trips: Sequence[int] = ()) -> Cost:
    """The cost of a program compiled for a TPU.

    Args:
        text: `compiled.as_text()`.
        told: `compiled.cost_analysis()`.
        unknown_trips: as `hlo_text.ran` takes them.
    """
    cycles = copied = kernels = 0
    for one in ran(parsed(text), unknown_trips=unknown_trips, enters=lambda made: _cycles(made) is None):
        cycles += one.times * (_cycles(one.instruction) or 0)
        copied += one.times * _copied(one.instruction)
        kernels += one.times * (_KERNEL in one.instruction.rest)
    names = ("flops", "bytes accessed", "optimal_seconds")
    known = {name: float(told[name]) for name in names if told and name in told}
    return Cost(cycles=cycles, copied_bytes=copied, kernels=kernels, told=known)


def estimates(
    works: Sequence[Work],
    calls: Mapping[str, Sequence[tuple[str, int]]],
    costs: Mapping[str, Cost],
    chip: Chip,
) -> dict[str, Estimated]:
    """Phase -> XLA's estimate, of the phases all of whose programs were compiled.

    Args:
        works: the phases of a step.
        calls: phase -> its programs, and how often each is called in one of its runs.
        costs: of the programs.
        chip: what they run on.
    """
    made = {}
    for work in works:
        programs = calls[work.phase]
        if any(name not in costs for name, _ in programs):
            continue
        runs = [(work.runs * times, costs[name]) for name, times in programs]
        kernel = any(cost.kernels for _, cost in runs)
        made[work.phase] = Estimated(
            phase=work.phase,
            operations_s=sum(times * cost.cycles for times, cost in runs) / chip.cycles_s,
            copies_s=sum(times * cost.copied_bytes for times, cost in runs) / chip.device_hbm_bytes_s,
            kernels_s=max(
                work.kernel_flops / chip.device_flops, work.kernel_hbm_bytes / chip.device_hbm_bytes_s
            )
            if kernel
            else 0.0,
            ici_s=bound(work, chip).ici_s,
        )
    return made


def _cycles(made: Instruction) -> int | None:
    """The cycles that the compiler expects of an operation; None where it says nothing."""
    told = _CYCLES.search(made.rest)
    return int(told[1]) if told and int(told[1]) < _UNKNOWN else None


def _copied(made: Instruction) -> int:
    """Bytes of the device's memory that an asynchronous copy reads or writes."""
    if made.opcode != "copy-start" or (ends := _COPIED.match(made.type)) is None or _HOST in made.type:
        return 0
    return sum(array_bytes(end) for end in ends.groups() if _FAST not in end)
