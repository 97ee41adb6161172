"""Builds the meshes of a run from the `parallel` section of its configuration."""

from collections.abc import Sequence

import jax

from dapo_jax.config import ConfigError, ParallelConfig
from dapo_jax.parallel.mesh import AnyDevice, Meshes, batch_shards, make_mesh, make_meshes


def mesh_of(
    axes: ParallelConfig,
    *,
    rows_per_microbatch: int | None = None,
    devices: Sequence[AnyDevice] | None = None,
) -> jax.sharding.Mesh:
    """Returns the mesh that `axes` describes. It consists of `devices`, which defaults to all devices. Raises ConfigError if the axes do not match the number
    of devices, or the rows of a microbatch cannot be distributed evenly over the mesh."""
    sizes = {"data": axes.data, "fsdp": axes.fsdp, "tensor": axes.tensor, "context": axes.context}
    mesh = make_mesh(**sizes, devices=devices)
    spread = batch_shards(mesh.shape)
    if rows_per_microbatch is not None and rows_per_microbatch % spread:
        raise ConfigError(
            f"batch.rows_per_microbatch={rows_per_microbatch} must be a multiple of parallel.data x parallel.fsdp = "
            f"{spread}, because the rows are distributed over these axes; for example {rows_per_microbatch // spread * spread + spread}"
        )
    return mesh


def meshes_of(
    axes: ParallelConfig,
    *,
    rows_per_microbatch: int | None = None,
    devices: Sequence[AnyDevice] | None = None,
) -> Meshes:
    """Returns the meshes of the trainer and the samplers that `axes` describes. For the other arguments, see `mesh_of`. Raises ConfigError if `mesh_of` failed,
    or the samplers do not match the number of processes or devices."""
    train = mesh_of(axes, rows_per_microbatch=rows_per_microbatch, devices=devices)
    return make_meshes(train, sampler_tensor=axes.sampler_tensor, sampler_hosts=axes.sampler_hosts)
