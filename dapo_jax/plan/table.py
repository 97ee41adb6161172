"""A plan as tables for people."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo_jax.plan.expected_step import Sampling
from dapo_jax.plan.freeing import held_in
from dapo_jax.plan.json_output import cache_of
from dapo_jax.plan.memory import MARGIN, Phase
from dapo_jax.plan.plan import Plan, Program
from dapo_jax.plan.refusals import needed_bytes, of_scalars
from dapo_jax.plan.suggest import Tried
from dapo_jax.plan.units import size


def show(plan: Plan, console: Console) -> None:
    """Prints a plan."""
    console.print(_heading(plan), highlight=False)
    _rows(console, "Sizes", ("what", "of one device"), _sizes(plan))
    if plan.slice is None:
        _show_expected(plan, console)
        console.print("Without --topology: shapes alone. With one, the programs are compiled for it.")
        return
    memory = [
        (p.name, *(_memory(p.memory, name) for name in _COLUMNS), f"{p.compile_s:.0f} s")
        for p in plan.programs
    ]
    _rows(console, "Programs, on each device", ("program", *_COLUMNS, "compiled in"), memory)
    _rows(
        console,
        f"Resident together, on each device; limit {size(plan.limit or 0)} = {size(plan.slice.chip.device_hbm_bytes)} "
        f"less {MARGIN:.0%}",
        ("phase", "parts", "total", "fits"),
        [
            (phase.name, " + ".join(f"{name} {size(count)}" for name, count in phase.parts.items()), size(phase.total),
             "yes" if phase.total <= (plan.limit or 0) else "NO")
            for phase in _fullest(plan.phases)
        ],
    )  # fmt: skip
    if fits := _cache_fit(plan):
        console.print(fits, highlight=False)
    traffic = [
        (p.name, kind.kind, f"{kind.count:,}", f"{kind.received_bytes / 1e9:,.3f}")
        for p in plan.programs
        for kind in p.traffic
    ]
    _rows(console, "Collectives of one run", ("program", "kind", "count", "GB received by a device"), traffic)
    _show_roofline(plan, console)
    _show_expected(plan, console)


def show_failures(plan: Plan, tried: Sequence[Tried], console: Console) -> None:
    """Says what does not fit, what takes the memory, and what was found to fit."""
    for program in plan.programs:
        if program.name not in plan.failures:
            continue
        if program.memory is None:
            console.print(f"DOES NOT FIT: {_refused(program)}", style="bold", highlight=False)
            if of_scalars(program.refusal):
                continue
        else:
            phase = next(phase for phase in plan.phases if phase.program == program.name)
            console.print(
                f"DOES NOT FIT: {phase.name} needs {size(phase.total)}, {size(phase.total - (plan.limit or 0))} over "
                f"the limit of {size(plan.limit or 0)}",
                style="bold",
                highlight=False,
            )
        for held in held_in(plan, program.name):
            ways = "".join(f"; {way}" for way in held.ways)
            of = f"{size(held.bytes)} of {size(plan.limit or 0)}"
            console.print(f"    {_NAMES.get(held.part, held.part)}: {of}{ways}", highlight=False)
        if program.largest:
            console.print(f"  the largest arrays of {program.name}:", highlight=False)
        for array in program.largest:
            console.print(f"    {size(array.bytes)} {array.shape} {array.operation}", highlight=False)
    for one in tried:
        verdict = "fits" if one.fits else "does not fit"
        console.print(f"compiled: {' '.join(one.overrides)}: {verdict}", highlight=False)
    if tried and not any(one.fits for one in tried):
        console.print("None of these fits; a larger slice, or shorter responses, would.")


def show_sweep(plans: Sequence[tuple[str, Plan | str]], console: Console) -> None:
    """Prints the meshes that were tried, best first."""
    rows = [
        (name, "-", "-", found) if isinstance(found, str)
        else (name, f"{found.step_s:,.0f}", size(max(phase.total for phase in found.phases)), "fits")
        for name, found in plans
    ]  # fmt: skip
    _rows(console, "Meshes, best first", ("mesh", "roofline s a step", "memory at most", ""), rows)


_NAMES = {
    "train state": "the train state",
    "sampler weights": "the sampler's weights",
    "decode state": "the decode state (the cache, and logits of the slots)",
    "minibatches": "the minibatches of a step",
    "gradient": "the gradient so far",
    "reference policy": "the reference policy",
    "paused responses": "the logits of responses that pause beside the slots",
}
_COLUMNS = ("arguments", "outputs", "aliased", "temporaries", "code", "needed")


def _memory(memory: Any, name: str) -> str:
    return "refused" if memory is None else size(getattr(memory, name))


def _heading(plan: Plan) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.layout.train.items())
    sampler = (
        " x ".join(f"{axis} {size}" for axis, size in plan.layout.sampler.items() if size > 1) or "1 device"
    )
    where = "the devices of the configuration or at hand" if plan.slice is None else (
        f"{plan.slice.name}: {plan.slice.chips} chips on {plan.slice.hosts} hosts"
    )  # fmt: skip
    lines = [
        f"{plan.config.model.source}: {plan.decoder.parameters:,} parameters"
        + (
            f", {plan.decoder.trained_parameters:,} more in adapters, which are trained"
            if plan.decoder.lora
            else ""
        ),
        f"{where}; mesh {mesh}; {plan.layout.samplers} samplers, each {sampler}",
        *(f"assumed: {note}" for note in plan.work.notes),
    ]
    if plan.slice is not None and plan.slice.chip.name == "v4":
        lines.append(
            "libtpu describes the two cores of a v4 chip as two devices; a v4 host joins them to one"
        )
    return "\n".join(lines)


def _sizes(plan: Plan) -> list[tuple[str, str]]:
    there, work, cache = plan.resident, plan.work, cache_of(plan)
    return [
        ("train state (parameters and moments)", size(there.state)),
        *([("the moments' part of it, which optimizer.offload keeps in the host's memory", size(there.moments))] if there.moments else []),
        *([("frozen weights", size(there.base))] if there.base else []),
        *([("the sampler's own copy of them", size(there.sampler_base))] if there.sampler_base else []),
        *([("reference policy", size(there.reference))] if there.reference else []),
        ("sampler's weights", size(there.weights)),
        ("rotations of all positions", size(there.rotations)),
        (f"decode state of {plan.config.sampling.slots} slots a sampler", size(there.decode_state)),
        ("cache of a token, over a sampler's devices", size(cache["bytes_per_token"])),
        (f"cache of {cache['tokens']:,} tokens in pages of {cache['page_tokens']:,}, over a sampler's devices", size(cache["bytes"])),
        (f"responses side by side, of up to {cache['slot_tokens']:,} tokens each with its prompt", f"{cache['in_flight']:,.0f}"),
        ("prompts that one call of prefill has read", size(there.prefix)),
        *([("a longer sequence, in parts as it is read", size(there.buffers)), ("the same once it is read", size(there.reread))] if there.buffers else []),
        ("arrays of one update", size(there.minibatch)),
        *([("the part of them in shorter rows", size(there.shorter)), ("gradient between programs of one update", size(there.gradient))]
          if there.gradient else []),
        ("tokens sampled a step", f"{work.responses * work.response_mean:,.0f}"),
        ("tokens trained on a step, prompts included", f"{work.trained * work.sequence:,.0f}"),
        ("updates a step x microbatches", f"{work.updates} x {work.microbatches}"),
        *_flops(plan),
    ]  # fmt: skip


def _fullest(found: Sequence[Phase]) -> list[Phase]:
    """The phases, of those of one name, whose programs follow each other, the one with the most on a device."""
    by_name: dict[str, Phase] = {}
    for phase in found:
        by_name[phase.name] = max(by_name.get(phase.name, phase), phase, key=lambda one: one.total)
    return list(by_name.values())


def _cache_fit(plan: Plan) -> str:
    """The cache as it is configured beside the one that fits."""
    fits, cache = plan.cache_fit, cache_of(plan)
    if fits is None:
        return ""
    told = (
        f"cache: {cache['tokens']:,} tokens are configured, {cache['in_flight']:,.0f} responses side by side"
    )
    where = f"{fits.tokens:,} tokens fit, {fits.in_flight:,.0f} responses"
    if fits.tokens > cache["tokens"]:
        return f"{told}, where {where} (sampling.cache_tokens={fits.tokens} sampling.slots={fits.slots})"
    return f"{told}; {where} (sampling.cache_tokens={fits.tokens})"


def _flops(plan: Plan) -> list[tuple[str, str]]:
    return [
        (f"operations a step, {work.phase}, TFLOP", f"{work.flops / 1e12:,.3f}")
        for work in plan.works
        if work.flops
    ]


def _show_roofline(plan: Plan, console: Console) -> None:
    rows = [
        (bound.work.phase, f"{bound.work.runs:,.0f}", f"{bound.compute_s:,.2f}", f"{bound.hbm_s:,.2f}", f"{bound.ici_s:,.2f}",
         f"{bound.seconds:,.2f}", bound.limit, _estimated(plan, bound.work.phase))
        for bound in plan.bounds
    ]  # fmt: skip
    title = "Roofline, seconds of a step (a bound by the chip's peaks), and XLA's estimate (its cycles for one operation after another); not measured"
    columns = ("phase", "runs", "compute", "memory", "interconnect", "longest", "which", "XLA's estimate")
    _rows(console, title, columns, rows)
    console.print(
        f"a step takes {plan.step_s:,.1f} s or more; model FLOPs utilisation is {plan.mfu_bound:.1%} or less",
        highlight=False,
    )


def _show_expected(plan: Plan, console: Console) -> None:
    """Both ways of sampling beside each other."""
    found = plan.expected
    told = (found.waves, found.flight)

    def row(what: str, text: Callable[[Sampling], str]) -> tuple[str, ...]:
        return (what, *map(text, told))

    seconds = [] if plan.slice is None else [
        row("sampling, s", lambda way: f"{way.seconds or 0:,.1f}"),
        row("of these reading, s", lambda way: f"{way.read_s or 0:,.1f}"),
        row("the whole step, with the roofline of the other phases, s", lambda way: f"{way.step_s or 0:,.1f}"),
        row(f"the run of {plan.config.steps:,} steps without its evaluations, chip-hours", lambda way: f"{plan.chip_hours(way) or 0:,.1f}"),
    ]  # fmt: skip
    _rows(
        console,
        "Expected step: a simulation, not measured",
        ("", "in waves", f"{found.in_flight:,} in flight"),
        [
            *seconds,
            row("decode steps one after another", lambda way: f"{way.decode_steps:,.0f}"),
            row("slot time idle", lambda way: f"{way.idle_frac:.1%}"),
            row("tokens drawn", lambda way: f"{way.drawn_tokens:,.0f}"),
            row("tokens thrown away, of informative groups beyond need", lambda way: f"{way.thrown_away_tokens:,.0f}"),
            row("tokens read again, prompts included", lambda way: f"{way.read_again_tokens:,.0f}"),
            row(
                "age of a group's oldest token in steps: mean, 95%, most",
                lambda way: f"{way.age_mean:.2f}, {way.age_p95:.0f}, {way.age_max}",
            ),
            row("a checkpoint on disk", lambda way: size(plan.checkpoint_bytes(way))),
            row("tokens and log-probabilities that go on or wait, in a checkpoint", lambda way: size(way.kept_bytes)),
        ],
    )  # fmt: skip
    for line in found.assumed:
        console.print(f"assumed: {line}", highlight=False)


def _refused(program: Program) -> str:
    """Why the compiler does not take a program, in words."""
    needs = needed_bytes(program.refusal)
    if of_scalars(program.refusal):
        return (
            f"{program.name}: the tables of all slots' pages take {size(needs or 0)} of a core's memory for scalars, which is too much: "
            "take fewer sampling.slots, or larger sampling.page_tokens"
        )
    return f"{program.name} alone needs {size(needs)}" if needs else f"{program.name}: {program.refusal}"


def _estimated(plan: Plan, phase: str) -> str:
    found = plan.estimates.get(phase)
    return "-" if found is None else f"{found.seconds:,.2f}"


def _rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    made = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 or column in ("parts", "kind") else "right")
    for row in rows:
        made.add_row(*row)
    console.print(made)
