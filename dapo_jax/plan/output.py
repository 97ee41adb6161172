"""Prints a plan as tables, or converts it to JSON data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo_jax.dapo.tokens import bytes_per_token
from dapo_jax.plan.compiled import needed_bytes
from dapo_jax.plan.memory import MARGIN, Phase
from dapo_jax.plan.plan import Plan
from dapo_jax.plan.remedies import ResidentPart, Tried, held_in
from dapo_jax.plan.roofline import cache_bytes_per_token
from dapo_jax.plan.split import Split
from dapo_jax.plan.workload import Assumptions
from dapo_jax.run.updater_setup import recorded_values

SCHEMA_VERSION = 8
"""Version of the JSON output. It increases when a field is removed or its meaning changes."""

_LINES = 40
"""Maximum number of lines printed from a compiler's message."""

_COLUMNS = ("arguments", "outputs", "aliased", "temporaries", "code", "needed")


def as_data(plan: Plan) -> dict[str, Any]:
    """Returns the data that `--json` prints. Units are bytes, seconds and operations; memory and work are per device."""
    derived = ("limit", "failures", "in_flight", "response_bytes", "checkpoint_bytes", "chip_hours")
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(plan, name) for name in derived},
        "cache_tokens": plan.pages.tokens,
        "fits": plan.fits if plan.programs else None,
        "model": {
            "source": plan.config.model.source,
            **_data(plan.decoder, "parameters", "active_parameters", "trained_parameters"),
        },
        "topology": plan.topology and _data(plan.topology, "name", "chips", "hosts"),
        "sizes": _data(plan.sizes),
        "work": _data(plan.work, "context"),
        "works": [_data(work) for work in plan.works],
        "resident": _data(plan.resident),
        "pages": _data(plan.pages),
        "cached_token_bytes": cache_bytes_per_token(plan.config, plan.decoder),
        "recorded_bytes": recorded_bytes(plan),
        "recurrent_state_bytes": plan.decoder.state_bytes,
        "cache_fit": plan.cache_fit and _data(plan.cache_fit),
        "programs": [
            {**_data(program), "memory": program.memory and _data(program.memory, "needed")} for program in plan.programs
        ],
        "phases": [_data(phase, "total") for phase in plan.phases],
        "held": {name: [_data(held) for held in held_in(plan, name)] for name in plan.failures},
        "roofline": plan.topology and {
            "step_s": plan.step_s,
            "mfu_bound": plan.mfu_bound,
            "phases": [_data(bound) for bound in plan.bounds],
        },
    }  # fmt: skip


def _data(value: Any, *derived: str) -> dict[str, Any]:
    """Returns the fields of a dataclass and the properties named in `derived`."""
    return {**asdict(value), **{name: getattr(value, name) for name in derived}}


def swept_as_data(plans: Sequence[tuple[str, Plan | str]]) -> list[dict[str, Any]]:
    """Returns the data that `--json` prints for a sweep, best mesh first. Each mesh has its plan, or the reason why it cannot be used."""
    return [{"mesh": name, **({"reason": planned} if isinstance(planned, str) else as_data(planned))} for name, planned in plans]  # fmt: skip


def show(plan: Plan, console: Console) -> None:
    """Prints the tables of a plan."""
    console.print(_heading(plan))
    _rows(console, "Sizes, on each device unless noted", ("quantity", "value"), _sizes(plan))
    if plan.topology is None:
        console.print("Computed from shapes alone; --topology also compiles the programs for TPUs or GPUs.")
        return
    memory = [
        (
            program.name,
            *(
                "refused" if program.memory is None else size(getattr(program.memory, name))
                for name in _COLUMNS
            ),
            f"{program.compile_s:.0f} s",
        )
        for program in plan.programs
    ]
    _rows(console, "Programs, on each device", ("program", *_COLUMNS, "compiled in"), memory)
    limit, hbm = plan.limit or 0, plan.topology.chip.device_hbm_bytes
    resident = [
        (phase.name, " + ".join(f"{name} {size(count)}" for name, count in phase.parts.items()), size(phase.total),
         "yes" if phase.total <= limit else "NO")
        for phase in _fullest(plan.phases)
    ]  # fmt: skip
    title = f"Resident at the same time, on each device; limit {size(limit)} = {size(hbm)} minus {MARGIN:.0%}"
    _rows(console, title, ("phase", "parts", "total", "fits"), resident)
    if (fits := plan.cache_fit) is not None:
        slots = f" sampling.slots={fits.slots}" if fits.tokens > plan.pages.tokens else ""
        console.print(
            f"KV cache: {plan.pages.tokens:,} tokens ({plan.in_flight:,.0f} responses in parallel) are configured; {fits.tokens:,} "
            f"tokens ({fits.in_flight:,.0f} responses) would fit, with sampling.cache_tokens={fits.tokens}{slots}",
        )
    network, links = plan.topology.has_network, plan.topology.chip.links
    traffic = [
        (program.name, kind.kind, f"{kind.count:,}", f"{(kind.received_bytes - kind.network_bytes) / 1e9:,.3f}",
         *[f"{kind.network_bytes / 1e9:,.3f}"] * network)
        for program in plan.programs
        for kind in program.traffic
    ]  # fmt: skip
    columns = ("program", "kind", "count", f"GB received per device over {links}", *["over the network"] * network)  # fmt: skip
    _rows(console, "Collectives per run", columns, traffic)
    roofline = [
        (bound.work.phase, f"{bound.work.runs:,.0f}", f"{bound.compute_s:,.2f}", f"{bound.hbm_s:,.2f}", f"{bound.ici_s:,.2f}",
         *[f"{bound.network_s:,.2f}"] * network, f"{bound.seconds:,.2f}", bound.limit)
        for bound in plan.bounds
    ]  # fmt: skip
    title = "Roofline, seconds per step: a lower bound from the chip's peak rates, not a measurement"
    columns = ("phase", "runs", "compute", "memory", "interconnect", *["network"] * network, "longest", "limited by")  # fmt: skip
    _rows(console, title, columns, roofline)
    if plan.config.cluster.samplers:
        console.print(f"these devices take at least {plan.step_s:,.1f} s for their part of a step")
    else:
        console.print(
            f"a step takes at least {plan.step_s:,.1f} s, and {plan.config.steps:,} steps take at least {plan.chip_hours:,.1f} chip-hours; "
            f"model FLOPs utilisation is at most {plan.mfu_bound:.1%}",
        )
    measured = [
        f"{bound.work.phase} {bound.measured_s:,.1f} s ({plan.topology.chip.measured[bound.work.phase]:.0%} of the roofline)"
        for bound in plan.bounds
        if bound.measured_s
    ]
    if measured:
        console.print(
            f"measured on one {plan.topology.chip.name} with the shapes of Qwen3-0.6B; at the same shares, a step takes: {', '.join(measured)}"
        )


def show_verdict(plan: Plan, tried: Sequence[Tried], console: Console) -> None:
    """Prints one block for each kind of array in the programs that do not fit, with the changes that shrink it, and the verdict as the last line."""
    limit, refusals = size(plan.limit), {one.name: one.refusal for one in plan.programs}
    totals = {name: needed_bytes(refusal) or 0 for name, refusal in refusals.items()}
    totals |= {phase.program: phase.total for phase in plan.phases}
    failed = sorted(plan.failures, key=lambda name: -totals[name])
    blocks: dict[str, list[ResidentPart]] = {}
    for name in failed:
        for held in held_in(plan, name):
            own = held.part.endswith(f" {name}")  # added by it, or all of it
            blocks.setdefault("arrays of a program itself" if own else held.part, []).append(held)
    for kind, parts in sorted(blocks.items(), key=lambda block: -max(held.bytes for held in block[1])):
        largest = max(held.bytes for held in parts)
        console.print(f"{kind}: {size(largest)} of {limit} (programs: {len(parts)})")
        ways = {way.change.partition("=")[0]: way for held in reversed(parts) for way in held.ways}
        for way in ways.values():
            console.print(f"    {way.change}" + f" frees {size(way.frees)}" * bool(way.frees))
    refusal = next(filter(None, (refusals[name] for name in failed)), "")
    for line in refusal.splitlines()[:_LINES]:
        console.print(f"  {line}", markup=False)
    for one in tried:
        console.print(f"compiled: {' '.join(one.overrides)}: {'fits' if one.fits else 'does not fit'}")
    for name in sorted(totals, key=lambda name: (name not in failed, -totals[name]))[:1]:
        phase = next((phase.name for phase in plan.phases if phase.program == name), f"{name} alone")
        verdict = f"DOES NOT FIT: {len(failed)} of {len(totals)} programs" if failed else "FITS"
        with_it = "".join(f"; it fits with {' '.join(one.overrides)}" for one in tried if one.fits)
        needs = f"{phase} needs {size(totals[name])} of {limit} on each device{with_it}"
        console.print(f"{verdict}; {needs}", style="bold")


def show_split(split: Split, assumed: Assumptions, console: Console) -> None:
    """Prints the seconds of each side of a run with sample workers, and the step with some values of `rollout.weight_rounds`."""
    sides = [
        (f"sampling: {split.rounds:,.1f} rounds, at {assumed.sampling_share:g} of the roofline (--sampling-share)", f"{split.sampling_s:,.1f}"),
        (f"log-probabilities and updates, at {assumed.update_share:g} of the roofline (--update-share)", f"{split.update_s:,.1f}"),
        (f"transfer of {size(split.weight_bytes)} of weights, at {assumed.transfer_gbit_s:g} Gbit/s (--transfer)", f"{split.transfer_s:,.1f}"),
    ]  # fmt: skip
    _rows(console, "A step with sample workers", ("phase", "seconds"), sides)
    steps = [
        (f"{step.weight_rounds}{' (suggested)' * (step.weight_rounds == split.suggested)}",
         *(f"{seconds:,.1f}" for seconds in (step.seconds, step.samplers_wait_s, step.trainer_waits_s)), f"{step.earlier_frac:.0%}")
        for step in split.steps
    ]  # fmt: skip
    columns = ("rollout.weight_rounds", "seconds per step", "sample workers wait", "trainer waits", "tokens one version old")  # fmt: skip
    _rows(console, "Further rounds during the update", columns, steps)
    if not split.suggested:
        console.print(
            "rollout.weight_rounds saves no time: it needs one training process, and steps of at least one round"
        )


def show_sweep(plans: Sequence[tuple[str, Plan | str]], console: Console) -> None:
    """Prints one row for each mesh in a sweep, best mesh first."""
    rows = [
        (name, "-", "-", planned) if isinstance(planned, str)
        else (name, f"{planned.step_s:,.0f}", size(max(phase.total for phase in planned.phases)), "fits")
        for name, planned in plans
    ]  # fmt: skip
    _rows(console, "Meshes, best first", ("mesh", "roofline s per step", "peak memory", ""), rows)


def size(count: int | float | None) -> str:
    """Formats a number of bytes in the largest unit in which the number is at least 1.

    >>> size(3 * 2**29), size(2048), size(7), size(None)
    ('1.50 GiB', '2.0 KiB', '7 B', 'unknown')
    """
    if count is None:
        return "unknown"
    for unit, power, digits in (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)):
        if count >= 2**power:
            return f"{count / 2**power:,.{digits}f} {unit}"
    return f"{count:,.0f} B"


def _heading(plan: Plan) -> str:
    decoder, topology = plan.decoder, plan.topology
    mesh = " x ".join(f"{axis} {count}" for axis, count in plan.sizes.train.items())
    sampler = " x ".join(f"{axis} {count}" for axis, count in plan.sizes.sampler.items() if count > 1)
    adapters = f", and {decoder.trained_parameters:,} trained in adapters" if decoder.lora else ""
    where = "the configured devices"
    if topology is not None:
        where = f"{topology.name}: {topology.chips} chips ({plan.sizes.devices} devices) on {topology.hosts} hosts"
    if not plan.resident.state:
        where = f"each of {plan.sizes.samplers} sample workers: {where}"
    lines = (
        f"{plan.config.model.source}: {decoder.size_note}{adapters}",
        f"{where}; mesh {mesh}; {plan.sizes.samplers} samplers, each {sampler or '1 device'}",
        *(f"assumed: {note}" for note in plan.work.notes),
    )
    return "\n".join(lines)


def _sizes(plan: Plan) -> list[tuple[str, str]]:
    resident, work, pages = plan.resident, plan.work, plan.pages
    arrays = [
        ("train state (parameters and moments)", resident.state),
        ("of these, moments, which optimizer.offload would keep in host memory", resident.moments),
        ("frozen weights", resident.base),
        ("the sampler's own copy of the frozen weights", resident.sampler_base),
        ("reference policy", resident.reference),
        ("teacher", resident.teacher),
        ("sampler's weights", resident.weights),
        ("rotary embedding of all positions", resident.rotations),
        (f"decode state of {plan.config.sampling.slots} slots per sampler", resident.decode_state),
        ("one cached token, on all devices of a sampler", cache_bytes_per_token(plan.config, plan.decoder)),
        ("records of the responses of one step, in host memory", recorded_bytes(plan)),
        (f"KV cache of {pages.tokens:,} tokens in pages of {pages.page_tokens:,}, on all devices of a sampler", plan.cache_bytes),
        (f"KV cache of one response of {pages.capacity:,} tokens with its prompt, on all of its devices", plan.response_bytes),
        ("recurrent state of one sequence, on all devices of a sampler", plan.decoder.state_bytes),
        ("prompts prefilled in one call", resident.prefix),
        ("a longer sequence while it is prefilled in chunks", resident.buffers),
        ("the same sequence after its prefill", resident.reread),
        ("input arrays of one update", resident.minibatch),
        ("of these, arrays of shorter rows", resident.shorter),
        ("gradient kept between the programs of one update", resident.gradient),
        ("trained weights and moments in a checkpoint on disk", resident.state and plan.checkpoint_bytes),
    ]  # fmt: skip
    return [
        *((name, size(count)) for name, count in arrays if count),
        (f"responses decoded in parallel per sampler, each of up to {pages.capacity:,} tokens with its prompt", f"{plan.in_flight:,.0f}"),
        ("tokens sampled per step, on all devices", f"{work.responses * work.response_mean:,.0f}"),
        ("tokens trained on per step, with prompts, on all devices", f"{work.trained * work.sequence:,.0f}"),
        ("updates per step x microbatches", f"{work.updates} x {work.microbatches}"),
        *((f"operations per step, {work.phase}, TFLOP", f"{work.flops / 1e12:,.3f}") for work in plan.works if work.flops),
    ]  # fmt: skip


def recorded_bytes(plan: Plan) -> int:
    """Returns the size in bytes of the records of all responses of a step (see `Tokens`), at their mean length. Each process has them in host memory."""
    token = bytes_per_token(recorded_values(plan.config, plan.decoder))
    return round(plan.work.responses * plan.work.response_mean * token)


def _fullest(phases: Sequence[Phase]) -> list[Phase]:
    """Returns, for each phase name, the phase that uses the most bytes on a device."""
    by_name: dict[str, Phase] = {}
    for phase in phases:
        by_name[phase.name] = max(by_name.get(phase.name, phase), phase, key=lambda phase: phase.total)
    return list(by_name.values())


def _rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in ("parts", "kind") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
