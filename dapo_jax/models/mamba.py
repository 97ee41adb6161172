"""Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060): a recurrent mixer whose state changes by a product that does not depend on the state.

Each head has a state S [state, head_dim]. A token with step d, rate r, input x, and the vectors B and C of the head's group computes

    S <- exp(-r d) S + B (d x)^T,    output = S^T C + D x.

So it is the recurrence of `models.recurrent` with the key B, the query C, and the change d x. The convolution has biases. All of this is in float32.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layer_kinds import Attend
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.recurrent import CHUNK, Mixed, Recurrent
from dapo_jax.models.rope import RopeTables


@dataclass(frozen=True)
class Mamba(Recurrent):
    """The sizes of a Mamba-2 layer."""

    heads: int
    head_dim: int
    groups: int
    """Number of groups of heads. The heads of a group have the same B and C."""
    state_dim: int
    """Number of dimensions of B and C."""

    stack = "mamba_blocks"
    path = "mamba"
    inputs = dict.fromkeys(("value_gate", "value", "key", "query", "step"), "in_proj")

    def __post_init__(self) -> None:
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(f"the {self.groups} groups of a Mamba layer must divide its {self.heads} heads")

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        shared = self.groups, self.state_dim
        return {"query": shared, "key": shared, "value": (self.heads, self.head_dim)}

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        found = super().parameters(config)
        for name in ("value", "key", "query"):
            found[f"{name}_conv_bias"] = Parameter(
                shape=self.sizes[name], axes=found[name].axes[:2], tensor="mamba.conv1d.bias", float32=True
            )
        found["skip"] = replace(found["decay"], start=1.0, tensor="mamba.D")
        found["mamba_norm"] = Parameter(
            shape=self.sizes["value"], axes=("heads", "head_dim"), start=1.0, tensor="mamba.norm.weight", float32=True
        )  # fmt: skip
        return found

    def mix(
        self, layer: Any, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        gate, value, key, query, step = layer.project(tuple(self.inputs), x)
        steps = jax.nn.softplus(step + layer.step_bias[...][:, None])
        decay = -jnp.exp(layer.decay[...])[:, None] * steps
        filters = layer.query_conv[...], layer.key_conv[...], layer.value_conv[...]
        biases = layer.query_conv_bias[...], layer.key_conv_bias[...], layer.value_conv_bias[...]
        out, kept = attend(Mixed(query, key, value, decay, steps, filters, biases, layer.skip[...]))
        return self.gated(layer, out, gate).reshape(-1, out.shape[2]), kept

    def gated(self, layer: Any, out: Array, gate: Array) -> Float[Array, "heads head_dim tokens"]:
        """Multiplies the output of the recurrence by silu of the gate, and then normalizes it over the heads of each group."""
        groups = max(1, self.groups * len(out) // self.heads)
        gated = (out * jax.nn.silu(gate)).reshape(groups, -1, out.shape[2])
        total = (gated * gated).sum(1)
        if self.groups == 1:
            total = layer.layout.over_heads(total[0])[None]
        mean = total * (self.groups / (self.heads * self.head_dim))
        normed = (gated * jax.lax.rsqrt(mean + layer.config.norm_eps)[:, None]).reshape(out.shape)
        return normed * layer.mamba_norm[...][..., None]

    def flops(self, config: Architecture, *, decoding: bool) -> tuple[int, int]:
        """A token is multiplied by the state once, and changes it once. In a chunk of C tokens, each token has C products of B and C, C products of changes, and its
        share of a product of C x C matrices for the decays."""
        chunk = 0 if decoding else CHUNK
        of_head = 4 * self.state_dim * self.head_dim + 2 * chunk * self.head_dim + 2 * chunk * chunk
        return self.heads * of_head + self.groups * 2 * chunk * self.state_dim, 0
