"""The gated MLP (Shazeer 2020, https://arxiv.org/abs/2002.05202): down (activation(gate x) * (up x))."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Integer

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.layer_kinds import Mlp
from dapo_jax.models.parameters import Parameter
from dapo_jax.models.projections import Projections

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}

_INPUTS = ("gate", "up")


@dataclass(frozen=True)
class Gated(Mlp):
    """One MLP. Its size and options are fields of `Architecture`."""

    group = "mlp"
    targets = ("gate_proj", "up_proj", "down_proj")

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, hidden = config.embed_dim, config.mlp_dim
        shapes = {"gate": (hidden, embed), "up": (hidden, embed), "down": (embed, hidden)}
        found = {
            name: Parameter(
                shape=shape, axes=("embed", "mlp") if name == "down" else ("mlp", "embed"), tensor=f"mlp.{name}_proj.weight", target=f"{name}_proj",
                fan_in=hidden * 2 * config.layers if name == "down" else embed, joins=_INPUTS if name in _INPUTS else (),
            )
            for name, shape in shapes.items()
        }  # fmt: skip
        for name, shape in shapes.items() if config.mlp_bias else ():
            axes = ("features",) if name == "down" else ("mlp",)
            found[f"{name}_bias"] = Parameter(shape=shape[:1], axes=axes, tensor=f"mlp.{name}_proj.bias")
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
