"""The state that training carries from update to update, and the optimizer that moves it."""

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
    """Where each array of the train state lies; `params` may be shapes alone. With `offload`, the moments lie in the host's memory."""
    moments = shardings(jax.eval_shape(optimizer.init, params), mesh)
    if offload:
        moments = jax.tree.map(lambda place: place.with_memory_kind(OFFLOADED), moments)
    return TrainState(shardings(params, mesh), moments)


def state_structs(
    params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """The shape, dtype and place of every array of the train state; `params` may be shapes alone."""
    shapes = TrainState(params, jax.eval_shape(optimizer.init, params))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(params, optimizer, mesh, offload=offload),
    )


def own_copy(params: nnx.State, mesh: Mesh) -> nnx.State:
    """A copy on the mesh, which stays alive when what it was made of is donated, and the other way round."""
    return jax.jit(_copied, out_shardings=shardings(params, mesh))(params)


def _copied(tree: nnx.State) -> nnx.State:
    return jax.tree.map(lambda leaf: leaf + 0, tree)


def init_state(
    params: nnx.State,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    offload: bool = False,
    copy: bool = True,
) -> TrainState:
    """Places `params` on the mesh and makes fresh moments beside them.

    Args:
        params: the weights that training starts from.
        optimizer: makes the moments.
        mesh: where the state lies.
        offload: the moments lie in the host's memory.
        copy: False: `params` are taken over and gone with the first update, which is handed the state to keep; that saves
            4 bytes a parameter.
    """
    placed = state_shardings(params, optimizer, mesh, offload=offload)
    own = own_copy(params, mesh) if copy else jax.device_put(params, placed.params)
    return TrainState(own, jax.jit(optimizer.init, out_shardings=placed.opt_state)(own))
