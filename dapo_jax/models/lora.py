"""Low-rank adapters (LoRA): the adapted matrices of a decoder, initial values of adapters, and the split of parameters into adapters and base.

An adapter changes the product with a frozen matrix W to y = W x + (alpha / rank) B A x (Hu et al. 2021, https://arxiv.org/abs/2106.09685, Eq. 3).
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dapo_jax.models.architecture import LORA_PARTS, LoraShape
from dapo_jax.models.parameters import Parameter, is_float32, output_dimensions
from dapo_jax.models.presets import GROUPS

TARGETS = tuple(dict.fromkeys(name for names in GROUPS.values() for name in names))
"""The matrices that may have adapters, by their names in transformers and PEFT."""

SETS = {"all": tuple(name for names in list(GROUPS.values())[:2] for name in names), **GROUPS}
"""Names for groups of matrices, which `lora_shape` accepts as targets."""


def lora_shape(*, rank: int, alpha: float, targets: Sequence[str]) -> LoraShape:
    """Returns a `LoraShape` for the linear layers `targets`, which are in `TARGETS` or keys of `SETS`.
    Raises ValueError if rank or alpha is not positive and finite, or a target is unknown. The message lists the known targets."""
    if rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"rank {rank} and alpha {alpha} must both be above 0 and finite")
    known = [*SETS, *TARGETS]
    if not targets or (set(targets) - set(known)):
        raise ValueError(f"targets {list(targets)} must name linear layers; known names: {', '.join(known)}")
    named = {name for target in targets for name in SETS.get(target, (target,))}
    chosen = tuple(name for name in TARGETS if name in named)
    return LoraShape(rank=rank, alpha=float(alpha), targets=chosen)


def adapter(rngs: nnx.Rngs, rank: int, name: str, matrix: Parameter) -> dict[str, nnx.LoRAParam[Array]]:
    """Returns the initial matrices A [rank, *inputs] and B [*outputs, rank] of the adapter of the matrix `name`, with their names.

    As in PEFT, A is uniform in +-1 / sqrt(inputs) (He et al. 2015, https://arxiv.org/abs/1502.01852, Eq. 15, with a
    negative slope of sqrt(5)). B is zero, so the initial policy equals its base model.
    """
    outputs, axes = output_dimensions(matrix.axes).stop, matrix.axes
    inputs = matrix.shape[outputs:]
    bound = math.prod(inputs) ** -0.5
    initial = jax.random.uniform(rngs.params(), (rank, *inputs), jnp.float32, -bound, bound)
    zeros = jnp.zeros((*matrix.shape[:outputs], rank), jnp.float32)
    first, second = LORA_PARTS
    joins = tuple(f"{other}_{first}" for other in matrix.joins)
    return {
        f"{name}_{first}": nnx.LoRAParam(initial, axes=("rank", *axes[outputs:]), joins=joins),
        f"{name}_{second}": nnx.LoRAParam(zeros, axes=(*axes[:outputs], "rank")),
    }


def parted(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Splits a decoder's parameters into (trained, frozen). If there are adapters, only they are trained. Otherwise, all parameters are."""
    adapters, base = nnx.split_state(params, nnx.LoRAParam, ...)
    return (adapters, base) if adapters else (base, adapters)


def rounded_to(dtype: str, params: nnx.State) -> nnx.State:
    """Casts parameters to `dtype`, except the parameters that stay float32 (see `is_float32`)."""

    def cast(leaf: nnx.Variable) -> nnx.Variable:
        return leaf if is_float32(leaf) else leaf.replace(leaf[...].astype(dtype))

    return jax.tree.map(cast, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
