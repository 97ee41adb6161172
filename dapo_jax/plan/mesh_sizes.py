"""The devices that a configuration needs, whether they are present or not, and the sizes of its meshes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from dapo_jax.config import ParallelConfig
from dapo_jax.parallel.mesh import AXES, BATCH_AXES, Absent, AnyDevice

HOST_DEVICES = 4
"""Devices per host that are assumed for absent devices, as on a TPU VM."""


def devices_of_run(parallel: ParallelConfig) -> Sequence[AnyDevice]:
    """Returns the present devices. If `parallel` needs a different number, returns absent devices, 4 per host."""
    present, sizes = jax.devices(), [getattr(parallel, axis) for axis in AXES]
    if -1 in sizes or math.prod(sizes) == len(present):
        return present
    platform, kind = present[0].platform, present[0].device_kind
    return [Absent(at, at // HOST_DEVICES, platform, kind) for at in range(math.prod(sizes))]


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The size of each mesh axis."""

    train: Mapping[str, int]
    sampler: Mapping[str, int]
    samplers: int

    @property
    def devices(self) -> int:
        """Number of devices of the whole run."""
        return math.prod(self.train.values())

    @property
    def sampler_devices(self) -> int:
        """Number of devices of one sampler."""
        return math.prod(self.sampler.values())


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Returns the number of devices over which rows or slots are sharded."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)
