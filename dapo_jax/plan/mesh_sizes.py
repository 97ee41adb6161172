"""Sizes of the meshes of a run, whether their devices are there or not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from dapo_jax.config import ConfigError, ParallelConfig
from dapo_jax.parallel.mesh import AXES, BATCH_AXES, Meshes

HOST_DEVICES = 4
"""Devices of a host, where there are none to count: those of a TPU VM."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Mesh axis -> its size."""

    train: Mapping[str, int]
    sampler: Mapping[str, int]
    samplers: int

    @property
    def devices(self) -> int:
        """Devices of the whole run."""
        return math.prod(self.train.values())

    @property
    def sampler_devices(self) -> int:
        """Devices of one sampler."""
        return math.prod(self.sampler.values())

    def share_of(self, in_flight: int) -> int:
        """The most that one sampler has of so many responses in flight."""
        return -(-in_flight // self.samplers)


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Over how many devices rows or slots are spread."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def layout_of(meshes: Meshes) -> Layout:
    """The sizes of meshes that exist."""
    train, sampler = ({axis: mesh.shape[axis] for axis in AXES} for mesh in (meshes.train, meshes.sampler))
    return Layout(train=train, sampler=sampler, samplers=meshes.count)


def described(parallel: ParallelConfig) -> Layout | None:
    """The sizes that `parallel` names, on hosts of 4 devices; None if one of them is -1 and depends on the devices.

    Raises:
        ConfigError: the devices do not make up samplers.
    """
    train = {axis: getattr(parallel, axis) for axis in AXES}
    if -1 in train.values():
        return None
    devices = math.prod(train.values())
    each = min(devices, HOST_DEVICES * parallel.sampler_hosts)
    tensor = parallel.sampler_tensor or math.gcd(train["tensor"], each)
    if devices % each or each % tensor:
        raise ConfigError(
            f"{devices} devices on hosts of {HOST_DEVICES} do not make up samplers of {each} with "
            f"parallel.sampler_tensor={tensor}"
        )
    sampler = {**dict.fromkeys(AXES, 1), "data": each // tensor, "tensor": tensor}
    return Layout(train=train, sampler=sampler, samplers=devices // each)


def one_device(parallel: ParallelConfig) -> ParallelConfig:
    """The same with every axis of size 1: where only the names of the axes matter."""
    sizes = {field.name: getattr(parallel, field.name) for field in fields(parallel)}
    return ParallelConfig(**{**sizes, **dict.fromkeys(AXES, 1), "sampler_tensor": 1, "sampler_hosts": 1})
