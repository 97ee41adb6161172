"""Low-rank adapters (LoRA): which matrices of a decoder have one, how they start, and how parameters part into adapters and base.

An adapter adds to what a frozen matrix W gives: y = W x + (alpha / rank) B A x (Hu et al. 2021, https://arxiv.org/abs/2106.09685, Eq. 3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dapo_jax.models.layout import output_dimensions

MATRICES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""The linear layers of a block by the names of transformers and PEFT, and what `Block` calls them."""

LORA_PARTS = ("lora_a", "lora_b")
"""The parameters of an adapter, behind the name of its matrix and a line below."""

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")

SETS = {"all": ATTENTION + MLP, "attention": ATTENTION, "mlp": MLP}
"""Names for several linear layers."""


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """The adapters of a decoder: `lora_shape` makes one."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of `MATRICES`, in their order."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


def lora_shape(*, rank: int, alpha: float, targets: Sequence[str]) -> LoraShape:
    """Adapters of the linear layers that `targets` name, each by a name of `MATRICES` or of `SETS`.

    Raises:
        ValueError: rank or alpha is not above 0, or there is no such layer; the message names those that there are.
    """
    if rank < 1 or not alpha > 0:
        raise ValueError(f"rank {rank} and alpha {alpha} must both be more than 0")
    known = [*SETS, *MATRICES]
    if unknown := [name for name in targets if name not in known]:
        raise ValueError(f"no linear layer is called {unknown[0]!r}; there are {', '.join(known)}")
    if not targets:
        raise ValueError(f"no linear layer is named; there are {', '.join(known)}")
    named = {name for target in targets for name in SETS.get(target, (target,))}
    chosen = tuple(name for name in MATRICES if name in named)
    return LoraShape(rank=rank, alpha=float(alpha), targets=chosen)


def adapter(
    rngs: nnx.Rngs, rank: int, weight: Array, axes: tuple[str, ...]
) -> tuple[nnx.LoRAParam[Array], nnx.LoRAParam[Array]]:
    """A [rank, *inputs] and B [*outputs, rank] beside a matrix with the logical axes `axes`, its outputs first.

    A is uniform by He et al. 2015 (https://arxiv.org/abs/1502.01852, Eq. 15) with a negative slope of sqrt(5), that is within 1 / sqrt(inputs), as
    in PEFT. B is zero: the policy begins as its base.
    """
    outputs = output_dimensions(axes)
    inputs = weight.shape[outputs:]
    bound = math.prod(inputs) ** -0.5
    drawn = jax.random.uniform(rngs.params(), (rank, *inputs), jnp.float32, -bound, bound)
    zeros = jnp.zeros((*weight.shape[:outputs], rank), jnp.float32)
    return (
        nnx.LoRAParam(drawn, axes=("rank", *axes[outputs:])),
        nnx.LoRAParam(zeros, axes=(*axes[:outputs], "rank")),
    )


def parted(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """(what is trained, what is frozen) of a decoder's parameters: the adapters and the base; without adapters all and nothing."""
    adapters, base = nnx.split_state(params, nnx.LoRAParam, ...)
    return (adapters, base) if adapters else (base, adapters)


def put_together(trained: nnx.State, frozen: nnx.State) -> nnx.State:
    """The parameters that `parted` took apart."""
    return nnx.merge_state(frozen, trained)


def merged(layer: nnx.State, scale: float) -> nnx.State:
    """One layer's parameters without adapters: W + scale B A, in float32, in the place of each adapted matrix W."""
    adapters, base = nnx.split_state(layer, nnx.LoRAParam, ...)
    whole: dict[Any, Any] = dict(base)
    pairs: dict[Any, Any] = dict(adapters)
    for name in {name.rsplit("_lora_", 1)[0] for name in pairs}:
        a, b = (pairs[f"{name}_{part}"][...] for part in LORA_PARTS)
        change = jnp.einsum("or,ri->oi", b.reshape(-1, b.shape[-1]), a.reshape(len(a), -1))
        weight = whole[name]
        whole[name] = weight.replace(
            weight[...].astype(jnp.float32) + scale * change.reshape(weight[...].shape)
        )
    return nnx.State(whole)


def rounded_to(dtype: str, params: nnx.State) -> nnx.State:
    """Parameters in `dtype`, but for those of norms, which are applied in float32 whatever the others are in."""

    def cast(leaf: nnx.Variable) -> nnx.Variable:
        return leaf if leaf.get_metadata()["axes"] == ("norm",) else leaf.replace(leaf[...].astype(dtype))

    return jax.tree.map(cast, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
