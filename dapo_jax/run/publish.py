"""Weights from the trainer to the samplers of several processes."""

from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array

from dapo_jax.parallel import weights
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.weights import SamplerWeights


def weight_transfer(
    params: nnx.State, meshes: Meshes, *, dtype: str
) -> Callable[[nnx.State], SamplerWeights]:
    """The function that makes each sampler its weights of trainer parameters; every process must call it.

    No program can move arrays from all devices to some of them: one puts a copy for every sampler onto all devices, and
    each process takes the parts on its sampler's devices for arrays of that sampler, where they lie.
    """
    if meshes.count == 1:
        return weights.weight_transfer(params, meshes.sampler, dtype=dtype)
    publish = weights.weight_transfer(params, meshes.publish, dtype=dtype)

    def local(whole: Array) -> Array:
        # Nobody may donate or delete `whole`: both are the same memory.
        assert isinstance(whole.sharding, NamedSharding)
        here = NamedSharding(meshes.sampler, whole.sharding.spec)
        parts = [shard.data for shard in whole.addressable_shards]
        return jax.make_array_from_single_device_arrays(whole.shape, here, parts)

    return lambda params: jax.tree.map(local, publish(params))
