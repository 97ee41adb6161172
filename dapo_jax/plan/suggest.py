"""Configurations that would fit where a plan does not: changes of the configuration, each checked by compiling what failed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.plan.plan import Plan, plan_for
from dapo_jax.plan.programs import trains
from dapo_jax.plan.workload import Assumptions

_WORTH = 0.05
"""A part of a device's memory that is worth a change to what samples."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One change and whether what failed fits with it."""

    overrides: tuple[str, ...]
    fits: bool


def suggestions(
    plan: Plan,
    devices: Sequence[Any],
    *,
    assumed: Assumptions,
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> list[Tried]:
    """Changes that were compiled, in the order tried, until one fits for all programs that failed or the time is over.

    A compilation that has begun is finished, so this may take longer than `seconds` by one.
    """
    began, tried = time.monotonic(), []
    for overrides, config in _candidates(plan):
        if time.monotonic() - began > seconds:
            break
        say(f"trying {' '.join(overrides)}")
        try:
            found = plan_for(config, devices, slice=plan.slice, assumed=assumed, only=plan.failures, say=say)
        except ConfigError:
            continue  # a size that does not divide is no way out
        tried.append(Tried(overrides=overrides, fits=found.fits))
        if found.fits:
            break
    return tried


def _candidates(plan: Plan) -> Iterator[tuple[tuple[str, ...], TrainConfig]]:
    """Changes from the cheapest on; what samples and what trains are changed apart, then together."""
    config, failed = plan.config, plan.failures
    on_state = [name for name in failed if trains(name)]
    beside_weights = [name for name in failed if not name.startswith(("update", "score"))]
    training = list(_training(config, plan)) if on_state else [((), config)]
    sampling = list(_sampling(config, plan)) if beside_weights else [((), config)]
    for index in range(max(len(training), len(sampling))):
        first = training[min(index, len(training) - 1)]
        second = sampling[min(index, len(sampling) - 1)]
        if first[0] or second[0]:
            yield (
                tuple(dict.fromkeys((*first[0], *second[0]))),
                replace(
                    config,
                    model=first[1].model,
                    batch=first[1].batch,
                    optimizer=replace(
                        config.optimizer, offload=first[1].optimizer.offload or second[1].optimizer.offload
                    ),
                    parallel=replace(first[1].parallel, sampler_tensor=second[1].parallel.sampler_tensor),
                    sampling=second[1].sampling,
                ),
            )


def _training(config: TrainConfig, plan: Plan) -> Iterator[tuple[tuple[str, ...], TrainConfig]]:
    mesh, told = plan.layout.train, ()
    if config.model.remat != "full":
        config, told = replace(config, model=replace(config.model, remat="full")), ("model.remat=full",)
        yield told, config
    least = mesh["data"] * mesh["fsdp"]
    if config.batch.rows_per_microbatch > least:
        config = replace(config, batch=replace(config.batch, rows_per_microbatch=least))
        told = (*told, f"batch.rows_per_microbatch={least}")
        yield told, config
    if not config.optimizer.offload:
        config, told = _offloaded(config), (*told, "optimizer.offload=true")
        yield told, config
    tensor, fsdp = mesh["tensor"], mesh["fsdp"]
    while tensor < 8 and fsdp % 2 == 0:
        tensor, fsdp = tensor * 2, fsdp // 2
        rows = mesh["data"] * fsdp
        axes = replace(config.parallel, fsdp=fsdp, tensor=tensor)
        batch = replace(config.batch, rows_per_microbatch=rows)
        yield (
            (
                *told,
                f"parallel.fsdp={fsdp}",
                f"parallel.tensor={tensor}",
                f"batch.rows_per_microbatch={rows}",
            ),
            replace(config, parallel=axes, batch=batch),
        )


def _sampling(config: TrainConfig, plan: Plan) -> Iterator[tuple[tuple[str, ...], TrainConfig]]:
    mesh = plan.layout.sampler
    size = mesh["data"] * mesh["fsdp"] * mesh["tensor"]
    if mesh["tensor"] < size:
        told = (f"parallel.sampler_tensor={size}",)
        yield told, replace(config, parallel=replace(config.parallel, sampler_tensor=size))
    pages, slots = plan.pages, config.sampling.slots
    tokens, least = (
        pages.pools * pages.pool_pages * pages.page_tokens,
        pages.pools * pages.table_pages * pages.page_tokens,
    )
    if plan.resident.moments > _WORTH * (plan.limit or 0):
        yield ("optimizer.offload=true",), _offloaded(config)
    for quarters in (3, 2, 1):
        if (fewer := tokens * quarters // 4) >= least:
            told = (f"sampling.cache_tokens={fewer}",)
            yield told, replace(config, sampling=replace(config.sampling, cache_tokens=fewer))
    while slots % 2 == 0 and slots > 1:
        slots //= 2
        yield (f"sampling.slots={slots}",), replace(config, sampling=replace(config.sampling, slots=slots))


def _offloaded(config: TrainConfig) -> TrainConfig:
    """The same with the optimizer's moments in the host's memory."""
    return replace(config, optimizer=replace(config.optimizer, offload=True))
