"""The device meshes: one with four named axes for training, and one for each sampler.

All have one flat order of the devices, in which the devices of a process are adjacent: a jitted function can move arrays between
meshes only if they have the same devices in the same order. On a TPU slice neighbours in this order are linked (`torus`). Several
slices, joined by the data-centre network, follow one after the other, and only the axis `data` crosses from one to the next.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dapo_jax.config import ConfigError
from dapo_jax.parallel.torus import along_links

AXES = ("data", "fsdp", "tensor", "context")
BATCH_AXES = ("data", "fsdp")
"""Mesh axes over which the rows of a batch and the slots of the sampler are sharded."""


@dataclass(frozen=True)
class Absent:
    """A device that this machine lacks. Shapes are placed on it as on a present one; nothing is compiled for it."""

    id: int
    process_index: int
    platform: str
    device_kind: str

    def memory_stats(self) -> None:
        """Returns None: its memory is unknown."""


AnyDevice: TypeAlias = jax.Device | Absent


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = -1,
    tensor: int = 1,
    context: int = 1,
    devices: Sequence[AnyDevice] | None = None,
) -> Mesh:
    """Returns a mesh with the axes `data`, `fsdp`, `tensor`, `context`; one size may be -1 and takes the remaining devices.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices, or another axis than `data` would cross slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict(zip(AXES, (data, fsdp, tensor, context), strict=True))
    known = math.prod(size for size in sizes.values() if size != -1)
    wild = [name for name, size in sizes.items() if size == -1]
    arithmetic = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if len(wild) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ConfigError(f"mesh axes must be positive, at most one of them -1; got {arithmetic}")
    if len(devices) % known or (not wild and known != len(devices)):
        raise ConfigError(
            f"mesh axes {arithmetic} need {'a multiple of ' if wild else ''}{known} devices, {len(devices)} are there; "
            f"set one of parallel.{', parallel.'.join(AXES)} to -1 to take what the others leave"
        )
    shape = [len(devices) // known if size == -1 else size for size in sizes.values()]
    flat = _flat(_slices(devices), dict(zip(AXES, shape, strict=True)))
    return Mesh(np.asarray(flat).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The meshes on which a run trains and samples."""

    train: Mesh
    """All devices of all processes."""
    publish: Mesh
    """The same devices with a leading axis `sampler`: a row has the devices of one sampler."""
    sampler: Mesh
    """The row of `publish` with this process's devices and the axes `AXES`. Its programs run without the other samplers."""
    index: int
    """The number of that row: the sampler takes the ordinals that are `index` modulo `count`."""

    @property
    def count(self) -> int:
        """The number of samplers."""
        return self.publish.shape["sampler"]


def make_meshes(train: Mesh, *, sampler_tensor: int = 0, sampler_hosts: int = 1) -> Meshes:
    """Returns meshes with a sampler for every `sampler_hosts` processes.

    Args:
        train: from `make_mesh`.
        sampler_tensor: number of devices over which a sampler's weights are split; its slots are split over the rest. 0 is the
            largest divisor of the sampler's devices and the trainer's tensor axis.
        sampler_hosts: 1 unless the weights do not fit the devices of one process.

    Raises:
        ConfigError: the processes do not divide into samplers, a sampler would cross slices, or `sampler_tensor` does not divide
            its devices.
    """
    flat = train.devices.reshape(-1)
    hosts = len({device.process_index for device in flat})
    if hosts % sampler_hosts:
        raise ConfigError(
            f"parallel.sampler_hosts={sampler_hosts} must divide the {hosts} processes of the run: each sampler has as many"
        )
    rows = flat.reshape(hosts // sampler_hosts, -1)
    for row in rows:
        if (found := len({device.process_index for device in row})) != sampler_hosts:
            raise ConfigError(
                f"a sampler has devices of {found} processes, needs {sampler_hosts}: all processes need as many devices"
            )
        if len({_slice_of(device) for device in row}) > 1:
            raise ConfigError(
                f"with parallel.sampler_hosts={sampler_hosts} the sums of a sampler would cross the data-centre network between slices; "
                f"choose a divisor of the {hosts // len(_slices(list(flat)))} processes of a slice"
            )
    each = rows.shape[1]
    tensor = sampler_tensor or math.gcd(train.shape["tensor"], each)
    if each % tensor:
        raise ConfigError(f"parallel.sampler_tensor={tensor} must divide the {each} devices of a sampler")
    shape, automatic = (len(rows), each // tensor, 1, tensor, 1), (AxisType.Auto,) * (len(AXES) + 1)
    grid = rows.reshape(shape)
    # Devices that are only described (a topology to compile for) have no process here: then the first row.
    here = jax.process_index() if flat[0] in jax.devices() else flat[0].process_index
    index = next(i for i, row in enumerate(rows) if here in {device.process_index for device in row})
    return Meshes(
        train=train,
        publish=Mesh(grid, ("sampler", *AXES), axis_types=automatic),
        sampler=Mesh(grid[index], AXES, axis_types=automatic[1:]),
        index=index,
    )


def _slices(devices: Sequence[AnyDevice]) -> list[list[AnyDevice]]:
    """Returns the devices of each slice, process by process; devices other than TPUs are one slice."""
    found: dict[int, list[AnyDevice]] = {}
    for device in sorted(devices, key=lambda device: (_slice_of(device), device.process_index, device.id)):
        found.setdefault(_slice_of(device), []).append(device)
    return list(found.values())


def _slice_of(device: AnyDevice) -> int:
    # A GPU reports its machine as a slice, but all axes may cross machines.
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _flat(slices: Sequence[Sequence[AnyDevice]], sizes: Mapping[str, int]) -> list[AnyDevice]:
    """Returns all devices slice by slice, each along the links of its chips if they report coordinates."""
    count, data = len(slices), sizes["data"]
    if len({len(each) for each in slices}) > 1:
        raise ConfigError(
            f"the slices have {', '.join(str(len(each)) for each in slices)} devices, and need as many each"
        )
    if data % count:
        crossing = next(axis for axis in AXES[1:] if sizes[axis] > 1)
        raise ConfigError(
            f"{count} slices, parallel.data={data}: {crossing} would cross the data-centre network between the slices, which only data may; "
            f"set parallel.data={count} or a multiple of it, and the other axes for the {len(slices[0])} devices of a slice"
        )
    each = (data // count, *(sizes[axis] for axis in AXES[1:]))
    has_places = all(hasattr(device, "coords") for device in slices[0]) and slices[0][0].platform == "tpu"
    return [device for one in slices for device in (along_links(one, each) if has_places else one)]
