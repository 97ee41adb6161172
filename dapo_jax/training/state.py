"""The state that training carries from update to update, and the optimizer that moves it."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from dapo_jax.parallel.sharding import shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Master weights and optimizer moments, both in float32."""

    params: nnx.State | Any
    opt_state: PyTree


def make_optimizer(
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW at learning rate 1; the update scales by the step's rate.

    Decay is on all matrices and vectors, as torch's AdamW does it.
    """
    adamw = optax.adamw(1.0, b1=beta1, b2=beta2, eps=epsilon, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def warmed_up(learning_rate: float, *, step: int, warmup_steps: int) -> float:
    """The learning rate of step `step`, counted from 1: linear over `warmup_steps` rollout steps, then constant.

    >>> [warmed_up(1.0, step=step, warmup_steps=4) for step in (1, 2, 4, 9)]
    [0.25, 0.5, 1.0, 1.0]
    """
    return learning_rate * min(1.0, step / warmup_steps) if warmup_steps else learning_rate


def state_shardings(
    params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False
) -> TrainState:
    """Where each array of the train state lies; `params` may be shapes alone. With `offload`, the moments lie in the host's memory."""
    moments = shardings(jax.eval_shape(optimizer.init, params), mesh)
    if offload:
        moments = jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), moments)
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
    copy = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf + 0, tree), out_shardings=shardings(params, mesh)
    )
    return copy(params)


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
