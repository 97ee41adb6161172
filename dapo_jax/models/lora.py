"""Low-rank adapters (LoRA): the adapted matrices of a decoder, initial values of adapters, and the split of parameters into adapters and base.

An adapter changes the product with a frozen matrix W to y = W x + (alpha / rank) B A x (Hu et al. 2021, https://arxiv.org/abs/2106.09685, Eq. 3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dapo_jax.models.layout import is_float32, output_dimensions

MATRICES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""The linear layers of a block, as a mapping from their names in transformers and PEFT to their names in `Block`."""

DELTA_MATRICES = {"in_proj_z": "value_gate", "out_proj": "output"}
"""The linear layers of a Gated DeltaNet layer that adapters support, in place of the first four of `MATRICES`."""

LORA_PARTS = ("lora_a", "lora_b")
"""Suffixes of an adapter's parameter names. The matrix name and an underscore precede the suffix, as in `query_lora_a`."""

SETS = {
    "all": tuple(MATRICES), "attention": tuple(MATRICES)[:4], "mlp": tuple(MATRICES)[4:],
    "linear_attention": tuple(DELTA_MATRICES),
}  # fmt: skip
"""Names for groups of linear layers, which `lora_shape` accepts as targets."""


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """Rank, alpha and adapted matrices of a decoder's adapters. `lora_shape` creates and validates it."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The adapted matrices, as keys of `MATRICES` and `DELTA_MATRICES` in the same order."""

    @property
    def scale(self) -> float:
        """The factor alpha / rank, by which the product B A is multiplied."""
        return self.alpha / self.rank


def lora_shape(*, rank: int, alpha: float, targets: Sequence[str]) -> LoraShape:
    """Returns a `LoraShape` for the linear layers `targets`, which are keys of `MATRICES`, `DELTA_MATRICES` or `SETS`.

    Raises:
        ValueError: rank or alpha is not positive and finite, or a target is unknown. The message lists the known targets.
    """
    if rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"rank {rank} and alpha {alpha} must both be above 0 and finite")
    known = [*SETS, *MATRICES, *DELTA_MATRICES]
    if not targets or (set(targets) - set(known)):
        raise ValueError(f"targets {list(targets)} must name linear layers; known names: {', '.join(known)}")
    named = {name for target in targets for name in SETS.get(target, (target,))}
    chosen = tuple(name for name in (*MATRICES, *DELTA_MATRICES) if name in named)
    return LoraShape(rank=rank, alpha=float(alpha), targets=chosen)


def adapted_in(targets: Sequence[str], *, delta: bool) -> dict[str, str]:
    """Returns the targets that a layer has, with the names of their parameters. `delta`: the layer is a Gated DeltaNet layer."""
    mlp = {name: MATRICES[name] for name in SETS["mlp"]}
    there = DELTA_MATRICES | mlp if delta else MATRICES
    return {name: there[name] for name in targets if name in there}


def adapter(
    rngs: nnx.Rngs, rank: int, weight: Array, axes: tuple[str, ...]
) -> tuple[nnx.LoRAParam[Array], nnx.LoRAParam[Array]]:
    """Returns the initial matrices A [rank, *inputs] and B [*outputs, rank] for a matrix with the logical axes `axes`, outputs first.

    As in PEFT, A is uniform in +-1 / sqrt(inputs) (He et al. 2015, https://arxiv.org/abs/1502.01852, Eq. 15, with a
    negative slope of sqrt(5)). B is zero, so the initial policy equals its base model.
    """
    outputs = output_dimensions(axes).stop
    inputs = weight.shape[outputs:]
    bound = math.prod(inputs) ** -0.5
    initial = jax.random.uniform(rngs.params(), (rank, *inputs), jnp.float32, -bound, bound)
    zeros = jnp.zeros((*weight.shape[:outputs], rank), jnp.float32)
    return (
        nnx.LoRAParam(initial, axes=("rank", *axes[outputs:])),
        nnx.LoRAParam(zeros, axes=(*axes[:outputs], "rank")),
    )


def parted(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Splits a decoder's parameters into (trained, frozen). If there are adapters, only they are trained. Otherwise, all parameters are."""
    adapters, base = nnx.split_state(params, nnx.LoRAParam, ...)
    return (adapters, base) if adapters else (base, adapters)


def put_together(trained: nnx.State, frozen: nnx.State) -> nnx.State:
    """Joins the trained and frozen parameters that `parted` separated."""
    return nnx.merge_state(frozen, trained)


def rounded_to(dtype: str, params: nnx.State) -> nnx.State:
    """Casts parameters to `dtype`, except norms, which are always applied in float32."""

    def cast(leaf: nnx.Variable) -> nnx.Variable:
        return leaf if is_float32(leaf.get_metadata()["axes"]) else leaf.replace(leaf[...].astype(dtype))

    return jax.tree.map(cast, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
