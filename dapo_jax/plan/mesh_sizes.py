"""The sizes of a run's meshes, whether their devices are present or not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dapo_jax.config import ConfigError, ParallelConfig
from dapo_jax.parallel.mesh import AXES, BATCH_AXES

HOST_DEVICES = 4
"""Devices per host if none are present to count: as on a TPU VM."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The size of each mesh axis."""

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


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Returns the number of devices over which rows or slots are sharded."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def described(parallel: ParallelConfig) -> MeshSizes | None:
    """Returns the sizes in `parallel`, on hosts of 4 devices; None if one of them is -1 and depends on the devices.

    Raises:
        ConfigError: the devices cannot be divided into samplers.
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
    return MeshSizes(train=train, sampler=sampler, samplers=devices // each)
