"""Finds configurations that fit: lists changes that free memory, tests them by compiling, and compares meshes."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.config.loading import replaced
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.sharding import shardings
from dapo_jax.plan.compiled import needed_bytes
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.memory import together
from dapo_jax.plan.plan import Plan, plan
from dapo_jax.plan.roofline import prefill_shape_of
from dapo_jax.plan.topologies import Topology, devices_of
from dapo_jax.plan.workload import Assumptions
from dapo_jax.run.training_pass import for_mesh
from dapo_jax.sampling.engine_spec import BLOCK_SLOTS

_LEAST = 0.005
"""Arrays below this fraction of a device's memory are not listed."""

Say = Callable[[str], None]
Changes = dict[str, Any]
"""A configuration change, as a mapping from keys to new values."""


@dataclass(frozen=True)
class Way:
    """A configuration change that reduces memory use."""

    change: str
    """The change as text: keys with their new values."""
    frees: int | None = None
    """Bytes freed on each device; None if they are only known after compiling."""
    tries: Changes = field(default_factory=dict)
    """The same change as a mapping, for `suggestions` to try; empty if the change requires more devices or affects the training method."""


@dataclass(frozen=True, kw_only=True)
class ResidentPart:
    """One kind of array on a device, with the changes that would make it smaller."""

    part: str
    bytes: int
    ways: tuple[Way, ...]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Configuration changes, and whether all programs fit with them."""

    overrides: tuple[str, ...]
    fits: bool


def held_in(plan: Plan, program: str) -> list[ResidentPart]:
    """Returns the arrays on a device while `program` runs: the resident arrays, largest first, then the program's own arrays.

    If the compiler rejected the program, the last entry is the total memory that the program needs.
    """
    phase = next((phase for phase in plan.phases if phase.program == program), None)
    _, resident = together(program, plan.resident, updates=plan.work.updates)
    if phase is not None:
        added = {part: size for part, size in phase.parts.items() if part not in resident}
        total = phase.total
    else:
        refusal = next((one.refusal for one in plan.programs if one.name == program), "")
        total = needed_bytes(refusal) or 0
        added = {f"all of {program}": total}
    ranked, limit = sorted(resident.items(), key=lambda part: -part[1]), plan.limit or 0
    return [
        ResidentPart(part=part, bytes=size, ways=tuple(ways_to_shrink(plan, part, size, total - limit)))
        for part, size in (*ranked, *added.items())
        if size > _LEAST * limit
    ]


def ways_to_shrink(plan: Plan, part: str, held: int, over: int) -> Iterator[Way]:
    """Yields changes that shrink `part`, which occupies `held` bytes, for a program that exceeds the limit by `over` bytes."""
    config, sizes = plan.config, plan.sizes
    adapters = plan.decoder.lora is not None and part in ("train state", "gradient", "sampler weights")
    match part:
        case "train state" | "gradient" | "frozen weights":
            if part == "train state" and plan.resident.moments:
                note = " (keeps the moments in host memory)"
                yield _way({"optimizer.offload": True}, note, frees=plan.resident.moments)
            yield _more_devices(plan, held, adapters=adapters)
        case "reference policy" if config.loss.kl_coef:
            yield Way("loss.kl_coef=0", held)
        case "decode state":
            yield from _smaller_cache(plan, held, over)
        case "sampler weights" | "sampler's frozen weights":
            yield from _smaller_weights(plan, held, adapters=adapters)
        case "paused responses":
            slots, group = config.sampling.slots * sizes.samplers, config.batch.group_size
            if slots >= group:
                change = f"rollout.in_flight={slots // group * group} (of {config.rollout.in_flight})"
                yield Way(change, held)
        case "prefilled prompts":
            rows, width = (shape := prefill_shape_of(config)).rows, shape.width
            if fewer := rows // 2:
                yield _way({"sampling.prefill_tokens": fewer * width}, frees=held * (rows - fewer) // rows)
        case "minibatches":
            if fewer := (updates := plan.work.updates) // 2:
                change = f"batch.prompts_per_step={fewer * config.batch.groups_per_update} ({fewer} of {updates} updates per step)"
                yield Way(change, held * (updates - fewer) // updates)
        case "sequence prefilled in chunks" | "sequence that waits for its slot":
            limit = config.sampling.max_response_tokens
            yield Way(f"a lower sampling.max_response_tokens (now {limit})")
        case _ if part.startswith(("added by update", "all of update", "added by score", "all of score")):
            yield from _fewer_activations(plan)


def _way(tries: Changes, note: str = "", *, frees: int | None = None) -> Way:
    return Way(" ".join(_overrides(tries)) + note, frees=frees, tries=tries)


def _more_devices(plan: Plan, held: int, *, adapters: bool) -> Way:
    """Returns a change that shards arrays over twice as many devices, taken from the data axis if possible, and otherwise from a larger topology.
    Only some matrices of `adapters` are sharded, so the freed bytes are then not stated."""
    train, rows = plan.sizes.train, plan.config.batch.rows_per_microbatch
    frees = None if adapters else held // 2
    if train["data"] % 2 == 0:
        tries = {"parallel.fsdp": 2 * train["fsdp"], "parallel.data": train["data"] // 2}
        return _way(tries, frees=frees)
    over = 2 * train["fsdp"] * train["data"]
    filled = f" batch.rows_per_microbatch={-(-rows // over) * over}" if rows % over else ""
    change = f"parallel.fsdp={2 * train['fsdp']}{filled} on twice as many devices"
    return Way(change, frees)


def _smaller_cache(plan: Plan, held: int, over: int) -> Iterator[Way]:
    config, pages, tokens = plan.config.sampling, plan.pages, plan.pages.tokens
    spread = plan.sizes.sampler_devices // plan.sizes.sampler["tensor"]
    fits, unit, cache = (
        plan.cache_fit,
        pages.page_tokens * pages.pools,
        pages.bytes(plan.token_bytes) // spread,
    )
    fewer = math.floor(pages.fitting(cache - over, plan.token_bytes)) * unit if fits is None else fits.tokens
    block = spread * (BLOCK_SLOTS if config.batch_invariant else 1)
    fewer = max(pages.holder_pages() * unit, fewer if fewer < tokens else tokens // 2)
    fewer -= fewer % unit
    if pages.table_pages > 1 and fewer < tokens and not config.batch_invariant:
        frees = cache - replace(pages, pool_pages=fewer // unit).bytes(plan.token_bytes) // spread
        yield _way({"sampling.cache_tokens": fewer}, f" (of {tokens})", frees=frees)
    elif config.slots > block and not plan.config.rollout.in_flight:
        half = config.slots // 2 // block * block
        frees = held * (config.slots - half) // config.slots
        yield _way({"sampling.slots": half}, f" (of {config.slots})", frees=frees)
    if not config.cache_dtype:
        # In int8, each number occupies one byte, and each head of a token has a scale of 4 bytes.
        head_dim = plan.decoder.paged[0].head_dim
        share = 1 - (head_dim + 4) / (jnp.dtype(plan.config.model.compute_dtype).itemsize * head_dim)
        frees = int(cache * share)
        yield Way(f"sampling.cache_dtype=int8{_correction(plan.config)}", frees)


def _smaller_weights(plan: Plan, held: int, *, adapters: bool) -> Iterator[Way]:
    """Yields changes that shrink the sampler's weights. `adapters` cannot be stored in 8 bits."""
    devices, tensor, heads = plan.sizes.sampler_devices, plan.sizes.sampler["tensor"], plan.decoder.heads
    wider = [more for more in range(tensor + 1, devices + 1) if devices % more == 0 and heads % more == 0]
    if wider:
        frees = held - held * tensor // wider[-1]
        yield _way({"parallel.sampler_tensor": wider[-1]}, f" (now {tensor})", frees=frees)
    if not adapters and not plan.config.sampling.weight_dtype:
        change = f"sampling.weight_dtype=int8{_correction(plan.config)}"
        yield Way(change, held - held // jnp.dtype(plan.config.model.compute_dtype).itemsize)
    if not wider and plan.sizes.samplers > 1 and heads % (2 * tensor) == 0:
        hosts = 2 * plan.config.parallel.sampler_hosts
        change = f"parallel.sampler_hosts={hosts} parallel.sampler_tensor={2 * tensor} (one sampler on {hosts} hosts)"
        yield Way(change, held // 2)


def _correction(config: TrainConfig) -> str:
    """Returns a note that int8 sampling needs importance weights, or an empty string if the loss already corrects for the sampler's rounding."""
    return "" if config.corrects_sampler else " (with loss.correction=truncate)"


def _fewer_activations(plan: Plan) -> Iterator[Way]:
    model, rows, train = plan.config.model, plan.config.batch.rows_per_microbatch, plan.sizes.train
    tensor, fsdp, least = train["tensor"], train["fsdp"], train["data"] * train["fsdp"]
    if model.remat != "full":
        yield _way({"model.remat": "full"}, " (recomputes activations)")
    if model.compute_dtype != "bfloat16":
        yield Way("model.compute_dtype=bfloat16")
    if rows > least:
        yield _way({"batch.rows_per_microbatch": least}, f" (now {rows})")
    elif model.remat == "full" and tensor < 8 and fsdp % 2 == 0:
        half = {"fsdp": fsdp // 2, "tensor": 2 * tensor}
        mesh = AbstractMesh(tuple({**train, **half}.values()), tuple(train))
        with suppress(ValueError):  # the number of heads may not be divisible by `tensor`
            shardings(shapes_of(for_mesh(plan.decoder, mesh)), mesh)
            changes = {f"parallel.{axis}": size for axis, size in half.items()}
            yield _way({**changes, "batch.rows_per_microbatch": least // 2}, " (fewer tokens per device)")


def suggestions(
    first: Plan, *, assumed: Assumptions, seconds: float, say: Say = lambda text: None
) -> list[Tried]:
    """Shrinks the largest array, recompiles the programs that did not fit, and repeats this until they fit or `seconds` have passed.

    Returns all compiled changes in order. The last attempt may end after `seconds`, because compilation is not interrupted.
    """
    assert first.topology is not None, "without a topology nothing was compiled, so nothing fails"
    began, tried, changes, current = time.monotonic(), list[Tried](), Changes(), first
    used = list[Changes]()
    planned = partial(plan, topology=first.topology, assumed=assumed, only=first.failures, say=say)
    while not current.fits and time.monotonic() - began <= seconds:
        arrays = [array for program in current.failures for array in held_in(current, program)]
        arrays.sort(key=lambda array: -array.bytes)
        ways = [way.tries for array in arrays for way in array.ways if way.tries and way.tries not in used]
        if not ways:
            break
        used.append(ways[0])
        changed = _changed_plan(current.config, ways[0], planned, say)
        if isinstance(changed, Plan):
            current, changes = changed, changes | ways[0]
            tried.append(Tried(overrides=tuple(_overrides(changes)), fits=changed.fits))
    return tried


def sweep(
    config: TrainConfig,
    topology: Topology,
    *,
    assumed: Assumptions,
    only: Sequence[str] | None = None,
    say: Say = lambda text: None,
) -> list[tuple[str, Plan | str]]:
    """Plans every split of the devices into fsdp and tensor axes. The fastest mesh comes first. A mesh that does not fit is returned with the reason.

    A microbatch has one row per device of the batch axes, or a multiple of this if `batch.rows_per_microbatch` is larger.
    """
    decoder_of(config.model)  # so that an unsupported model raises an error before a compiler is loaded
    planned = partial(plan, topology=topology, assumed=assumed, only=only, say=say)
    plans: list[tuple[str, Plan | str]] = []
    devices, context, data = len(devices_of(topology)), config.parallel.context, max(config.parallel.data, 1)
    for tensor in (1, 2, 4, 8, 16):
        fsdp, rest = divmod(devices, tensor * context * data)
        if not fsdp or rest:
            continue
        rows = data * fsdp * max(1, config.batch.rows_per_microbatch // (data * fsdp))
        sizes = {"parallel.data": data, "parallel.fsdp": fsdp, "parallel.tensor": tensor}
        changes = {**sizes, "batch.rows_per_microbatch": rows}
        candidate = _changed_plan(config, changes, planned, say)
        failed = (
            isinstance(candidate, Plan)
            and not candidate.fits
            and f"does not fit: {', '.join(candidate.failures)}"
        )
        plans.append((f"fsdp {fsdp} x tensor {tensor}", failed or candidate))
    return sorted(plans, key=lambda named: math.inf if isinstance(named[1], str) else named[1].step_s)


def _changed_plan(
    config: TrainConfig, changes: Changes, planned: Callable[[TrainConfig], Plan], say: Say
) -> Plan | str:
    """Returns the plan of a changed configuration, or the error message if the change is invalid."""
    say(f"trying {' '.join(_overrides(changes))}")
    try:
        return planned(replaced(config, changes))
    except ConfigError as error:
        return str(error)


def _overrides(changes: Changes) -> list[str]:
    return [f"{key}={str(value).lower()}" for key, value in changes.items()]
