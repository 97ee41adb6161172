"""The train state: master weights and optimizer moments."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from dapo_jax.parallel.device_memory import OFFLOADED
from dapo_jax.parallel.sharding import shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Master weights and optimizer moments, both in float32."""

    params: nnx.State | Any
    opt_state: PyTree


def state_shardings(
    params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """Returns the sharding of each array in the train state. `params` may contain only shapes. With `offload`, optimizer moments are in host memory."""
    moments = shardings(jax.eval_shape(optimizer.init, params), mesh)
    if offload:
        moments = jax.tree.map(lambda sharding: sharding.with_memory_kind(OFFLOADED), moments)
    return TrainState(shardings(params, mesh), moments)


def state_structs(
    params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """Returns the shape, dtype and sharding of each array in the train state. `params` may contain only shapes."""
    shapes = TrainState(params, jax.eval_shape(optimizer.init, params))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(params, optimizer, mesh, offload=offload),
    )


def init_state(
    params: nnx.State,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    offload: bool = False,
    copy: bool = True,
) -> TrainState:
    """Places `params` on the mesh, and initializes the optimizer's moments, in host memory if `offload` is True.

    If `copy` is False, the state uses the arrays of `params`. This saves 4 bytes per parameter, but the first update donates the arrays.
    """
    placed = state_shardings(params, optimizer, mesh, offload=offload)
    copied = jax.jit(_copied, out_shardings=placed.params)
    weights = copied(params) if copy else jax.device_put(params, placed.params)
    return TrainState(weights, jax.jit(optimizer.init, out_shardings=placed.opt_state)(weights))


def _copied(tree: nnx.State) -> nnx.State:
    return jax.tree.map(lambda leaf: leaf + 0, tree)
