"""Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060): a recurrent mixer whose state changes by a product that does not depend on the state.

Each head has a state S [state, head_dim]. A token with step d, rate r, input x, and the vectors B and C of the head's group computes

    S <- exp(-r d) S + B (d x)^T,    output = S^T C + D x.

So it is the recurrence of `models.recurrent` with the key B, the query C, and the change d x. The convolution has biases. All of this is in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layer_kinds import Attend
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.projections import Projections
from dapo_jax.models.recurrent import CHUNK, Mixed, Recurrent, first_rates, first_steps
from dapo_jax.models.rope import RopeTables

_INPUTS = ("value_gate", "value", "key", "query", "step")
"""The matrices that are applied to the layer's input, in the order of their rows in a file."""


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

    def __post_init__(self) -> None:
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(f"the {self.groups} groups of a Mamba layer must divide its {self.heads} heads")

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        shared = self.groups, self.state_dim
        return {"query": shared, "key": shared, "value": (self.heads, self.head_dim)}

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, heads = config.embed_dim, (self.heads,)
        # Devices along `tensor` have different heads. One group cannot be split, so each of them has its B and C.
        shared = ("heads" if self.groups > 1 else "features", "head_dim")
        axes = {"query": shared, "key": shared, "value": ("heads", "head_dim")}
        shapes = {**self.sizes, "value_gate": self.sizes["value"], "step": heads}
        axes |= {"value_gate": axes["value"], "step": ("heads",)}

        def of_heads(name: str, start: float | Callable[[Array], Array]) -> Parameter:
            return Parameter(shape=heads, axes=("heads",), start=start, tensor=f"mamba.{name}", float32=True)

        filters, biases = {}, {}
        for name in ("value", "key", "query"):
            filters[f"{name}_conv"] = Parameter(
                shape=(*shapes[name], 1, self.taps), axes=(*axes[name], "features", "taps"), fan_in=self.taps, tensor="mamba.conv1d.weight", float32=True,
            )  # fmt: skip
            biases[f"{name}_conv_bias"] = Parameter(shape=shapes[name], axes=axes[name], tensor="mamba.conv1d.bias", float32=True)  # fmt: skip
        wide: dict[str, Any] = {"shape": self.sizes["value"], "axes": axes["value"]}
        return {
            **{
                name: Parameter(
                    shape=(*shapes[name], embed), axes=(*axes[name], "embed"), fan_in=embed, tensor="mamba.in_proj.weight", joins=_INPUTS
                )
                for name in _INPUTS
            },
            **filters,
            **biases,
            "decay": of_heads("A_log", partial(first_rates, shape=heads)),
            "step_bias": of_heads("dt_bias", partial(first_steps, shape=heads)),
            "skip": of_heads("D", 1.0),
            "mamba_norm": Parameter(**wide, start=1.0, tensor="mamba.norm.weight", float32=True),
            "output": Parameter(
                shape=(embed, *wide["shape"]), axes=("embed", *wide["axes"]), fan_in=math.prod(wide["shape"]) * 2 * config.layers,
                tensor="mamba.out_proj.weight", target="out_proj",
            ),
        }  # fmt: skip

    def mix(
        self, layer: Projections, x: Float[Array, "embed tokens"], rope: RopeTables, attend: Attend
    ) -> tuple[Float[Array, "features tokens"], Any]:
        given: Any = layer
        gate, value, key, query, step = layer.project(_INPUTS, x)
        steps = jax.nn.softplus(step + given.step_bias[...][:, None])
        filters = given.query_conv[...], given.key_conv[...], given.value_conv[...]
        biases = given.query_conv_bias[...], given.key_conv_bias[...], given.value_conv_bias[...]
        decay = -jnp.exp(given.decay[...])[:, None] * steps
        out, kept = attend(Mixed(query, key, value, decay, steps, filters, biases, given.skip[...]))
        # The norm is over the heads of a group, after the gate.
        gated = (out * jax.nn.silu(gate)).reshape(len(key), -1, out.shape[2])
        total = (gated * gated).sum(1)
        if self.groups == 1:
            total = layer.layout.over_heads(total[0])[None]
        mean = total * (self.groups / (self.heads * self.head_dim))
        normed = (gated * jax.lax.rsqrt(mean + layer.config.norm_eps)[:, None]).reshape(out.shape)
        return (normed * given.mamba_norm[...][..., None]).reshape(-1, out.shape[2]), kept

    def tail(self, x: Float[Array, "sequences heads dim past"]) -> Array:
        """Returns [sequences, channels, past]. Devices can split the channels of one group."""
        return x.reshape(len(x), -1, x.shape[-1])

    def flops(self, config: Architecture, *, decoding: bool) -> tuple[int, int]:
        """A token is multiplied by the state once, and changes it once. In a chunk of C tokens, each token has C products of B and C, C products of changes, and its
        share of a product of C x C matrices for the decays."""
        chunk = 0 if decoding else CHUNK
        of_head = 4 * self.state_dim * self.head_dim + 2 * chunk * self.head_dim + 2 * chunk * chunk
        return self.heads * of_head + self.groups * 2 * chunk * self.state_dim, 0
