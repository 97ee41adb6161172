"""Reads tensors by all processes of a run together: each process reads a share of the rows, which are then resharded.

The trainer's matrices are mostly split along their columns, and a stored matrix is contiguous by rows. If each process fetched the
columns of its own devices, it would fetch the whole model.
"""

import functools

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from dapo_jax.models.tensors import Cut, Rows, Shape
from dapo_jax.parallel.together import Together, meet


def read_by_rows(rows: Rows, stored: Shape, shape: Shape, target: NamedSharding) -> jax.Array:
    """Returns an array on `target`; each process reads a share of the rows, by its share of the devices. Every process must call it.

    Args:
        rows: reads rows; zeros beyond the last.
        stored: shape of the tensor in the file.
        shape: of the array, with the same values in the same order: an axis of `stored` may be two axes here.
        target: the array's sharding.
    """
    mesh = target.mesh
    whole = (-(-stored[0] // mesh.size) * mesh.size, *stored[1:])

    def range_of(index: Cut | None) -> tuple[int, int]:
        return (index[0] if index else slice(None)).indices(whole[0])[:2]

    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    held = [range_of(index) for index in by_device.addressable_devices_indices_map(whole).values()]
    # The devices of a process are adjacent on the mesh, so their rows are one range.
    first, last = min(start for start, _ in held), max(stop for _, stop in held)
    own = rows(first, last)

    def part(index: Cut | None) -> np.ndarray:
        start, stop = range_of(index)
        return own[start - first : stop - first]

    spread = jax.make_array_from_callback(whole, by_device, part)
    meet()  # one process may read for longer than a collective waits
    # Waits, so that the host does not fill its memory with tensors in transfer.
    return jax.block_until_ready(_mover(stored, shape, target)(spread))


@functools.lru_cache(maxsize=64)
def _mover(stored: Shape, shape: Shape, target: NamedSharding) -> Together:
    """Returns the program that moves rows from all devices to the target."""
    stages = [NamedSharding(target.mesh, spec) for spec in _stages(stored, shape, target)]

    def move(spread: Array) -> Array:
        for stage in stages:
            spread = lax.with_sharding_constraint(spread, stage)
        return spread[: stored[0]].reshape(shape)

    return Together(jax.jit(move, out_shardings=target))


def _stages(stored: Shape, shape: Shape, target: NamedSharding) -> list[PartitionSpec]:
    """Returns the shardings on the way to the target, so that no device gathers the whole: first the axes of the columns leave the rows."""
    spec = [*target.spec, *[None] * (len(shape) - len(target.spec))]
    if len(shape) > len(stored):
        merged = next(axis for axis, size in enumerate(stored) if shape[axis] != size)
        del spec[merged + 1]
    columns = {axis for entry in spec[1:] for axis in _axes(entry)}
    others = tuple(axis for axis in target.mesh.axis_names if axis not in columns)
    return [PartitionSpec(others, *spec[1:])]


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
