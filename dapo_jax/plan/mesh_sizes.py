"""Determines the devices that a configuration needs, whether or not they are present, and the sizes of its meshes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from dapo_jax.config import ParallelConfig
from dapo_jax.parallel.mesh import AXES, BATCH_AXES, Absent, AnyDevice

HOST_DEVICES = 4
"""Assumed number of devices per host if the devices are absent, as on a TPU VM."""


def devices_of_run(parallel: ParallelConfig) -> Sequence[AnyDevice]:
    """Returns the present devices, or `Absent` placeholders (4 per host) if `parallel` needs a different number of devices."""
    present, sizes = jax.devices(), [getattr(parallel, axis) for axis in AXES]
    if -1 in sizes or math.prod(sizes) == len(present):
        return present
    platform, kind = present[0].platform, present[0].device_kind
    return [Absent(at, at // HOST_DEVICES, platform, kind) for at in range(math.prod(sizes))]


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The axis sizes of the trainer mesh and of one sampler mesh, and the number of samplers."""

    train: Mapping[str, int]
    sampler: Mapping[str, int]
    samplers: int

    @property
    def devices(self) -> int:
        """Number of devices in the whole run."""
        return math.prod(self.train.values())

    @property
    def sampler_devices(self) -> int:
        """Number of devices of one sampler."""
        return math.prod(self.sampler.values())


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Returns the number of shards into which a mesh with these axis sizes splits rows or slots."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)
