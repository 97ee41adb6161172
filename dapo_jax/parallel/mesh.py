"""The device mesh: four named axes, each of which may be of size 1."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor", "context")
BATCH_AXES = ("data", "fsdp")
"""Mesh axes over which the rows of a batch and the slots of the sampler are spread."""


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    context: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes `data`, `fsdp`, `tensor`, `context`; one size may be -1 and takes the remaining devices.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict(zip(AXES, (data, fsdp, tensor, context), strict=True))
    known = math.prod(size for size in sizes.values() if size != -1)
    wild = [name for name, size in sizes.items() if size == -1]
    arithmetic = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if len(wild) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh axes must be positive, at most one of them -1; got {arithmetic}")
    if len(devices) % known or (not wild and known != len(devices)):
        raise ValueError(
            f"mesh axes {arithmetic} need a multiple of {known} devices, {len(devices)} are there; "
            f"set one of parallel.{', parallel.'.join(AXES)} to -1 to take what the others leave"
        )
    shape = [len(devices) // known if size == -1 else size for size in sizes.values()]
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
