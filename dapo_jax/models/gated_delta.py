"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): a mixer that is recurrent, with a state of fixed size.

Each value head has a state S [key_dim, value_dim]. A token with decay a, write strength b, key k, value v and query q computes

    S <- a S + k (b (v - a S^T k))^T,    output = S^T q / sqrt(key_dim).

`models.recurrent` has the recurrence over rows and for one token. docs/gated_delta.md derives its form for chunks. Before the recurrence, q and k are divided by
their norms. All of this is in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layer_kinds import Attend
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.projections import rms_norm
from dapo_jax.models.recurrent import CHUNK, Mixed, Recurrent, einsum
from dapo_jax.models.rope import RopeTables

_NORM_EPS = 1e-6
"""Added to the squared norms of queries and keys."""


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """The sizes of a Gated DeltaNet layer."""

    key_heads: int
    value_heads: int
    """Number of value heads. Each key head is shared by `value_heads / key_heads` of them."""
    key_dim: int
    value_dim: int
    by_key_head: bool = False
    """Whether two tensors of a file contain the rows of all input matrices, sorted by key head (Qwen3-Next)."""

    stack = "delta_blocks"
    group = "linear_attention"
    targets = ("in_proj_z", "out_proj")
    path = "linear_attn"
    inputs: ClassVar = {
        **dict.fromkeys(("query", "key", "value"), "in_proj_qkv"), "value_gate": "in_proj_z", "write": "in_proj_b", "forget": "in_proj_a",
    }  # fmt: skip

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_key_heads={self.key_heads} must divide linear_num_value_heads={self.value_heads}"
            )

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        keys = self.key_heads, self.key_dim
        return {"query": keys, "key": keys, "value": (self.value_heads, self.value_dim)}

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        found = super().parameters(config)
        tensor = f"{self.path}.norm.weight"
        found["delta_norm"] = Parameter(
            shape=(self.value_dim,), axes=("norm",), start=1.0, tensor=tensor, float32=True
        )
        for name in self.inputs if self.by_key_head else ():
            tensor = "in_proj_ba" if name in ("write", "forget") else "in_proj_qkvz"
            found[name] = replace(found[name], tensor=f"{self.path}.{tensor}.weight", blocks=self.key_heads)
        return found

    def mix(
        self, layer: Any, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        query, key, value, gate, write, forget = layer.project(tuple(self.inputs), x)
        steps = jax.nn.softplus(forget + layer.step_bias[...][:, None])
        decay = -jnp.exp(layer.decay[...])[:, None] * steps
        filters = layer.query_conv[...], layer.key_conv[...], layer.value_conv[...]
        out, kept = attend(Mixed(query, key, value, decay, jax.nn.sigmoid(write), filters))
        per_head = jax.vmap(rms_norm, in_axes=(0, None, None))
        out = per_head(out, layer.delta_norm[...], layer.config.norm_eps) * jax.nn.silu(gate)
        return out.reshape(-1, out.shape[2]), kept

    def prepared(self, query: Array, key: Array, axis: int) -> tuple[Array, Array]:
        return _normed(query, axis) * key.shape[axis] ** -0.5, _normed(key, axis)

    def change(self, key: Array, value: Array, write: Array, memory: Array) -> Array:
        return write[..., None] * (value - einsum("skd,skrde->skre", key, memory))

    def system(self, key: Array, write: Array, within: Array) -> Array:
        products = einsum("nbkid,nbkjd->nbkij", key, key)[:, :, :, None]
        lower = jnp.tril(within, -1) * products * write[..., None]
        return unit_inverse(lower) * write[..., None, :]

    def flops(self, config: Architecture, *, decoding: bool) -> tuple[int, int]:
        """A token is multiplied by the state twice, and changes it once.

        In a chunk of C tokens, each token has C products of keys, of queries and of changes (twice), and its share of the 2 log2(C) products of C x C
        matrices in the inverse and of one product for the decays.
        """
        chunk = 0 if decoding else CHUNK
        squares = 2 * chunk * chunk * (2 * math.ceil(math.log2(chunk)) + 1) if chunk else 0
        of_value = 6 * self.key_dim * self.value_dim + 4 * chunk * self.value_dim + squares
        return self.value_heads * of_value + self.key_heads * 4 * chunk * self.key_dim, 0


@jax.custom_vjp
def unit_inverse(lower: Float[Array, "*batch chunk chunk"]) -> Float[Array, "*batch chunk chunk"]:
    """Returns the inverse of I + L for a strictly lower triangular L.

    Products of matrices join the inverses of the diagonal blocks to inverses of blocks of twice the size. Sums of powers of L
    would lose all digits if L has large entries far from the diagonal.
    """
    size = lower.shape[-1]
    index, block = np.arange(size), 1
    inverse = jnp.broadcast_to(np.eye(size, dtype=lower.dtype), lower.shape)
    while block < size:
        pair, half = index // (2 * block), index // block % 2
        mask = (pair[:, None] == pair[None]) & (half[:, None] == 1) & (half[None] == 0)
        corner = jnp.where(np.broadcast_to(mask, lower.shape), lower, 0.0)
        inverse = inverse - _matmul(inverse, _matmul(corner, inverse))
        block *= 2
    return inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_matmul(turned, _matmul(cotangent, turned)), -1),)


def _forward(lower: Array) -> tuple[Array, Array]:
    inverse = unit_inverse(lower)
    return inverse, inverse


unit_inverse.defvjp(_forward, _inverse_backward)

_matmul: Callable[[Array, Array], Array] = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _normed(x: Array, axis: int) -> Array:
    return x * lax.rsqrt((x * x).sum(axis, keepdims=True) + _NORM_EPS)
