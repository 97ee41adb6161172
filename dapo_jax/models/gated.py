"""The gated MLP (Shazeer 2020, https://arxiv.org/abs/2002.05202): down (activation(gate x) * (up x))."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Integer

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layer_kinds import Mlp
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.projections import Projections

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}

_INPUTS = ("gate", "up")


def gated_parameters(
    config: Architecture, hidden: int, prefix: str = "", path: str = "mlp."
) -> dict[str, Parameter]:
    """Returns the matrices of a gated MLP with `hidden` features. Their names begin with `prefix`, and the names of their tensors with `path`."""
    embed, inputs = config.embed_dim, tuple(prefix + name for name in _INPUTS)
    rows: dict[str, Any] = {
        "shape": (hidden, embed),
        "axes": ("mlp", "embed"),
        "fan_in": embed,
        "joins": inputs,
    }
    deep = hidden * 2 * config.layers
    columns: dict[str, Any] = {"shape": (embed, hidden), "axes": ("embed", "mlp"), "fan_in": deep}
    matrices = {"gate": rows, "up": rows, "down": columns}
    return {
        prefix + name: Parameter(**matrix, tensor=f"{path}{name}_proj.weight", target=f"{name}_proj")
        for name, matrix in matrices.items()
    }


@dataclass(frozen=True)
class Gated(Mlp):
    """One MLP. Its size and options are fields of `Architecture`."""

    group = "mlp"
    targets = ("gate_proj", "up_proj", "down_proj")

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        found = gated_parameters(config, config.mlp_dim)
        for name in (*_INPUTS, "down") if config.mlp_bias else ():
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
        gate, up = layer.project(_INPUTS, layer.layout.inner(x, dtype=layer.compute_dtype))
        if layer.config.mlp_bias:
            gate, up = gate + layer.bias("gate"), up + layer.bias("up")
        hidden = ACTIVATIONS[layer.config.activation](gate) * up
        return layer.project(("down",), hidden)[0], None


GATED = Gated()
