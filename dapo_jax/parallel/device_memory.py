"""Computes the memory limit of a device, and the memory that sharded arrays need on each device."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from dapo_jax.parallel.mesh import AnyDevice
from dapo_jax.parallel.sharding import split
from dapo_jax.parallel.together import all_gather_bytes, meet

OFFLOADED = "pinned_host"
"""JAX's name for the kind of host memory that a device can access directly."""


def device_bytes(device: AnyDevice) -> int | None:
    """Returns the number of bytes that programs may use on a device, or None for a CPU or a device that reports no limit."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def least_device_bytes(mesh: Mesh) -> int | None:
    """Returns the minimum `device_bytes` over the mesh's devices, or None if a device reports no limit. Every process must call it."""
    if mesh.devices.flat[0].platform == "cpu":
        return None
    own = [device_bytes(device) for device in mesh.local_devices]
    least = 0 if None in own else min(filter(None, own), default=0)
    meet()  # Without this barrier, the collective could time out while another process loads files.
    return min(map(int, all_gather_bytes(b"%d" % least))) or None


def bytes_on_device(structs: PyTree, sizes: Mapping[str, int]) -> int:
    """Returns the number of bytes that arrays or shapes with a `NamedSharding` need on each device of a mesh with these axis `sizes`. Arrays in host memory
    (`OFFLOADED`) are not counted."""
    total = 0
    for leaf in jax.tree.leaves(structs):
        if leaf.sharding.memory_kind != OFFLOADED:
            # A PRNG key consists of two 32-bit integers.
            each = 8 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
            parts = math.prod(sizes[axis] for axes in split(leaf.sharding, leaf.ndim) for axis in axes)
            total += leaf.size * each // parts
    return total
