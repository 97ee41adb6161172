"""Device meshes: a mesh with four named axes for training, and a mesh for each sampler.

All meshes use the same flat order of devices, because a jitted function can only move arrays between meshes that have the same devices in
the same order. The devices of a process are adjacent in this order. Within a TPU slice, devices that are neighbours in this order are also
linked (`torus`). The order lists one slice after another. Slices communicate over the data-centre network, and only the axis `data` may span slices.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dapo_jax.config import ConfigError
from dapo_jax.parallel.torus import along_links

AXES = ("data", "fsdp", "tensor", "context")
BATCH_AXES = ("data", "fsdp")
"""Mesh axes over which batch rows and sampler slots are sharded."""


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Returns the number of shards into which a mesh with these axis sizes splits rows or slots."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


@dataclass(frozen=True)
class Absent:
    """Placeholder for a device that this machine does not have. Shapes can be placed on it, but programs cannot be compiled for it."""

    id: int
    process_index: int
    platform: str
    device_kind: str

    def memory_stats(self) -> None:
        """Returns None, because the memory of the device is unknown."""


AnyDevice: TypeAlias = jax.Device | Absent


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    context: int = 1,
    devices: Sequence[AnyDevice] | None = None,
) -> Mesh:
    """Creates a mesh with the axes `data`, `fsdp`, `tensor` and `context`. At most one size may be -1: this axis gets all remaining devices. Raises ConfigError
    if the product of the sizes is not the number of devices, or an axis other than `data` would span slices."""
    devices = jax.devices() if devices is None else devices
    sizes = dict(zip(AXES, (data, fsdp, tensor, context), strict=True))
    known = math.prod(size for size in sizes.values() if size != -1)
    wild = [name for name, size in sizes.items() if size == -1]
    arithmetic = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if len(devices) % known or (not wild and known != len(devices)):
        raise ConfigError(
            f"mesh axes {arithmetic} need {'a multiple of ' if wild else ''}{known} devices, but there are {len(devices)}; "
            f"set {_fitting(sizes, known, devices)}"
        )
    shape = [len(devices) // known if size == -1 else size for size in sizes.values()]
    flat = _flat(_slices(devices), dict(zip(AXES, shape, strict=True)))
    return Mesh(np.asarray(flat).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _fitting(sizes: Mapping[str, int], known: int, devices: Sequence[AnyDevice]) -> str:
    """Returns overrides for a mesh that fits: another size of one axis if possible. `known` is the product of the sizes other than -1."""
    has_wild = -1 in sizes.values()
    for name in (axis for axis in ("fsdp", *AXES) if sizes[axis] != -1):
        others = known // sizes[name]
        for size in range(sizes[name] if has_wild else len(devices), 0, -1):
            if len(devices) % (others * size) == 0 and (has_wild or others * size == len(devices)):
                with suppress(ConfigError):  # an axis may span slices
                    make_mesh(**{**sizes, name: size}, devices=devices)
                    return f"parallel.{name}={size}"
    return f"parallel.data={len(_slices(devices))} parallel.fsdp=-1 parallel.tensor=1 parallel.context=1"


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The meshes on which a run trains and samples."""

    train: Mesh
    """The mesh for training, with all devices of all processes."""
    publish: Mesh
    """The devices of `train`, with an additional first axis `sampler`. Each row along this axis contains the devices of one sampler."""
    sampler: Mesh
    """The row of `publish` that contains this process's devices, with the axes `AXES`. Programs on this mesh run independently of other samplers."""
    index: int
    """Index of the sampler's row in `publish`. The sampler handles the prompts whose ordinal equals `index` modulo `count`."""

    @property
    def count(self) -> int:
        """The number of samplers."""
        return self.publish.shape["sampler"]


def make_meshes(train: Mesh, *, sampler_tensor: int = 0, sampler_hosts: int = 1) -> Meshes:
    """Creates the meshes of a run, with a sampler for every `sampler_hosts` processes.

    Args:
        train: mesh from `make_mesh`.
        sampler_tensor: number of devices over which a sampler's weights are sharded. The sampler's slots are distributed over groups of this
            size. 0: the greatest common divisor of the sampler's number of devices and the trainer's tensor axis.
        sampler_hosts: number of processes per sampler. Use more than 1 only if the weights do not fit on the devices of one process.

    Raises:
        ConfigError: `sampler_hosts` does not divide the number of processes, a sampler would span slices, or `sampler_tensor` does not divide
            a sampler's devices.
    """
    flat = train.devices.reshape(-1)
    hosts = len({device.process_index for device in flat})
    if hosts % sampler_hosts:
        raise ConfigError(
            f"parallel.sampler_hosts={sampler_hosts} must divide the {hosts} processes of the run, so that each sampler has the same number of processes"
        )
    rows = flat.reshape(hosts // sampler_hosts, -1)
    for row in rows:
        if (found := len({device.process_index for device in row})) != sampler_hosts:
            raise ConfigError(
                f"a sampler has devices of {found} processes, needs {sampler_hosts}: all processes must have the same number of devices"
            )
        if len({_slice_of(device) for device in row}) > 1:
            raise ConfigError(
                f"with parallel.sampler_hosts={sampler_hosts}, the collectives of a sampler would cross the data-centre network between slices; "
                f"choose a divisor of the {hosts // len(_slices(list(flat)))} processes in a slice"
            )
    each = rows.shape[1]
    tensor = sampler_tensor or math.gcd(train.shape["tensor"], each)
    if each % tensor:
        raise ConfigError(f"parallel.sampler_tensor={tensor} must divide the {each} devices of a sampler")
    shape, automatic = (len(rows), each // tensor, 1, tensor, 1), (AxisType.Auto,) * (len(AXES) + 1)
    grid = rows.reshape(shape)
    # If the mesh is only a target for compilation, this process has no devices in it, so the first row is used.
    here = jax.process_index() if flat[0] in jax.devices() else flat[0].process_index
    index = next(i for i, row in enumerate(rows) if here in {device.process_index for device in row})
    return Meshes(
        train=train,
        publish=Mesh(grid, ("sampler", *AXES), axis_types=automatic),
        sampler=Mesh(grid[index], AXES, axis_types=automatic[1:]),
        index=index,
    )


def _slices(devices: Sequence[AnyDevice]) -> list[list[AnyDevice]]:
    """Returns the devices of each slice, process by process. Devices other than TPUs all belong to a single slice."""
    ordered = sorted(devices, key=lambda device: (_slice_of(device), device.process_index, device.id))
    return [list(each) for _, each in groupby(ordered, key=_slice_of)]


def _slice_of(device: AnyDevice) -> int:
    # GPUs report their machine as their slice. Unlike TPU slices, machines do not limit the axes: any axis may span several.
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _flat(slices: Sequence[Sequence[AnyDevice]], sizes: Mapping[str, int]) -> list[AnyDevice]:
    """Returns all devices, slice by slice. If TPU chips report coordinates, the devices in a slice are ordered along the links between chips."""
    count, data = len(slices), sizes["data"]
    if data % count:
        crossing = next(axis for axis in AXES[1:] if sizes[axis] > 1)
        raise ConfigError(
            f"{count} slices, parallel.data={data}: {crossing} would cross the data-centre network between slices, but only the axis data may; "
            f"set parallel.data={count} or a multiple of it, and choose the other axes for the {len(slices[0])} devices of a slice"
        )
    each = (data // count, *(sizes[axis] for axis in AXES[1:]))
    has_places = all(hasattr(device, "coords") for device in slices[0]) and slices[0][0].platform == "tpu"
    return [device for one in slices for device in (along_links(one, each) if has_places else one)]
