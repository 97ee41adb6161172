"""Mesh shapes tried one after another, best first by the roofline of a step.

A file of its own: it calls a plan many times, and is no part of one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dapo_jax.config import ConfigError, ParallelConfig, TrainConfig
from dapo_jax.plan.plan import Plan, plan_for
from dapo_jax.plan.sizes import decoder_of
from dapo_jax.plan.topologies import Slice, devices_of
from dapo_jax.plan.workload import Assumptions


def sweep(
    config: TrainConfig,
    slice: Slice,
    *,
    assumed: Assumptions,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[tuple[str, Plan | str]]:
    """Every division of the slice into fsdp and tensor: those that fit by their roofline, then the others with the reason.

    A microbatch has a row for each place on the batch axes, or a multiple if the configuration's has more.
    """
    decoder_of(config.model)  # a model that is not covered is so on every mesh
    devices = devices_of(slice)
    found: list[tuple[str, Plan | str]] = []
    for name, tried in _meshes(config, len(devices)):
        say(f"mesh {name}")
        try:
            made = plan_for(tried, devices, slice=slice, assumed=assumed, only=only, say=say)
        except ConfigError as error:
            found.append((name, str(error)))
            continue
        found.append((name, made if made.fits else f"does not fit: {', '.join(made.failures)}"))
    return sorted(found, key=lambda one: math.inf if isinstance(one[1], str) else one[1].step_s)


def _meshes(config: TrainConfig, devices: int) -> Iterator[tuple[str, TrainConfig]]:
    context, data = config.parallel.context, max(config.parallel.data, 1)
    for tensor in (1, 2, 4, 8, 16):
        fsdp, rest = divmod(devices, tensor * context * data)
        if rest or not fsdp:
            continue
        rows = data * fsdp
        rows *= max(1, config.batch.rows_per_microbatch // rows)
        parallel: ParallelConfig = replace(config.parallel, data=data, fsdp=fsdp, tensor=tensor)
        batch = replace(config.batch, rows_per_microbatch=rows)
        yield f"fsdp {fsdp} x tensor {tensor}", replace(config, parallel=parallel, batch=batch)
