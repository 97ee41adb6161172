"""The gated MLP (Shazeer 2020, https://arxiv.org/abs/2002.05202): down (activation(gate x) * (up x))."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layer_kinds import Mlp
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.projections import Projections

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": jax.nn.gelu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def inputs_of(config: Architecture, prefix: str = "") -> tuple[str, ...]:
    """Returns the names of the matrices that are applied to the input of an MLP."""
    return tuple(prefix + name for name in (("gate", "up") if config.mlp_gate else ("up",)))


def hidden_of(config: Architecture) -> Callable[..., Array]:
    """Returns the function of the products with `inputs_of` whose result is the input of the matrix down."""
    activation = ACTIVATIONS[config.activation]
    if config.gate_limit is not None:
        return partial(_bounded, config.gate_limit, config.gate_alpha)
    return (lambda gate, up: activation(gate) * up) if config.mlp_gate else activation


def _bounded(limit: float, alpha: float, gate: Array, up: Array) -> Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1.0) * gate * jax.nn.sigmoid(alpha * gate)


def gated_parameters(
    config: Architecture, hidden: int, prefix: str = "", path: str = "mlp."
) -> dict[str, Parameter]:
    """Returns the matrices of a gated MLP with `hidden` features. Their names begin with `prefix`, and the names of their tensors with `path`."""
    embed, inputs = config.embed_dim, inputs_of(config, prefix)
    rows: dict[str, Any] = {
        "shape": (hidden, embed),
        "axes": ("mlp", "embed"),
        "fan_in": embed,
        "joins": inputs,
    }
    deep = hidden * 2 * config.layers
    columns: dict[str, Any] = {"shape": (embed, hidden), "axes": ("embed", "mlp"), "fan_in": deep}
    matrices = {**dict.fromkeys(inputs_of(config), rows), "down": columns}
    return {
        prefix + name: Parameter(**matrix, tensor=f"{path}{name}_proj.weight", target=f"{name}_proj")
        for name, matrix in matrices.items()
    }


@dataclass(frozen=True)
class Gated(Mlp):
    """One MLP. Its options are fields of `Architecture`."""

    dim: int = 0
    """Number of hidden features, or 0 for `Architecture.mlp_dim`."""

    group = "mlp"
    targets = ("gate_proj", "up_proj", "down_proj")

    @property
    def prefix(self) -> str:
        """The beginning of the names of the matrices, if the layer has others."""
        return ""

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        found = gated_parameters(config, self.dim or config.mlp_dim, self.prefix)
        for name in tuple(found) if config.mlp_bias else ():
            axes = ("features",) if name == "down" else ("mlp",)
            found[f"{name}_bias"] = Parameter(
                shape=found[name].shape[:1], axes=axes, tensor=f"mlp.{name}_proj.bias"
            )
        return found

    def apply(
        self,
        layer: Projections,
        x: Float[Array, "embed part"],
        routes: Integer[Array, "tokens chosen"] | None,
    ) -> tuple[Float[Array, "embed tokens"], None]:
        names = inputs_of(layer.config, self.prefix)
        products = layer.project(names, layer.layout.inner(x, dtype=layer.compute_dtype))
        if layer.config.mlp_bias:
            products = [part + layer.bias(name) for part, name in zip(products, names, strict=True)]
        return layer.project((f"{self.prefix}down",), hidden_of(layer.config)(*products))[0], None


GATED = Gated()
