"""Gemma 4: its MLP, and its keys of config.json.

Layers with a window and layers without one have heads of different sizes. In some models, the last layers have no keys and values, and read the keys and values of an
earlier layer (`Attention.shares`). In some models, each layer has an embedding of its own for each token, and in others, experts process the tokens next to the MLP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Integer

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention_mixer import Attention
from dapo_jax.models.config_json import checked
from dapo_jax.models.experts import Experts
from dapo_jax.models.gated import ACTIVATIONS, gated_parameters, hidden_of, inputs_of
from dapo_jax.models.layer_kinds import Mlp
from dapo_jax.models.parameters import Parameter, norm
from dapo_jax.models.projections import rms_norm

NEAR, FULL = "sliding_attention", "full_attention"

_OF_ONE_SIZE = {
    "tie_word_embeddings": True, "vocab_size": 262_144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": None, "per_layer_config": None, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
    "sliding_window": 512, "layer_types": None, "final_logit_softcapping": None, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False, "use_bidirectional_attention": None,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        NEAR: {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
UNIFIED = {**_OF_ONE_SIZE, "sliding_window": 1024, "max_position_embeddings": 262_144}
"""The values of absent keys in config.json of the models whose encoders have no layers (12B)."""
DEFAULTS = {
    **_OF_ONE_SIZE, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "enable_moe_block": False, "num_experts": None,
    "top_k_experts": None,
}  # fmt: skip
"""The values of absent keys in config.json of all other models."""


@dataclass(frozen=True)
class Gemma4Mlp(Mlp):
    """An MLP, experts next to it if there are any, the layer's own embeddings if there are any, and a factor of the residual stream."""

    hidden: int
    """Number of hidden features of the MLP. `Architecture.mlp_dim` is the number of each expert's."""
    beside: Experts | None = None
    """The experts next to the MLP."""

    group = "mlp"
    targets = ("gate_proj", "up_proj", "down_proj")

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, own = config.embed_dim, config.layer_embed_dim
        found = gated_parameters(config, self.hidden, self._prefix)
        if self.experts:
            names = {"router": "router.proj.weight", "expert_scale": "router.per_expert_scale", "down": "experts.down_proj"}  # fmt: skip
            for name, parameter in self.experts.parameters(config).items():
                found[name] = replace(parameter, tensor=names.get(name, "experts.gate_up_proj"))
            found["router_scale"] = Parameter(
                shape=(embed,), axes=("norm",), start=1.0, float32=True, tensor="router.scale"
            )
            norms = {"shared_out": "post_feedforward_layernorm_1", "experts": "pre_feedforward_layernorm_2", "experts_out": "post_feedforward_layernorm_2"}  # fmt: skip
            found |= {f"{name}_norm": norm(config, embed, tensor=f"{theirs}.weight") for name, theirs in norms.items()}  # fmt: skip
        if own:
            found["layer_gate"] = Parameter(
                shape=(own, embed),
                axes=("features", "embed"),
                fan_in=embed,
                tensor="per_layer_input_gate.weight",
            )
            found["layer_output"] = Parameter(
                shape=(embed, own), axes=("embed", "features"), fan_in=own * 2 * config.layers, tensor="per_layer_projection.weight"
            )  # fmt: skip
            found["layer_out_norm"] = norm(config, embed, tensor="post_per_layer_input_norm.weight")
        found["layer_scalar"] = Parameter(
            shape=(1,), axes=("features",), start=1.0, float32=True, is_trained=False, tensor="layer_scalar"
        )
        return found

    @property
    def experts(self) -> Experts | None:
        return self.beside

    @property
    def _prefix(self) -> str:
        """The beginning of the names of the MLP's matrices."""
        return "shared_" if self.experts else ""

    def apply(
        self, layer: Any, x: Float[Array, "embed part"], routes: Integer[Array, "tokens chosen"] | None
    ) -> tuple[Float[Array, "embed tokens"], None]:
        config, inner = layer.config, layer.layout.inner(x, dtype=layer.compute_dtype)
        hidden = hidden_of(config)(*layer.project(inputs_of(config, self._prefix), inner))
        return layer.project((f"{self._prefix}down",), hidden)[0], None

    def add(
        self,
        layer: Any,
        x: Float[Array, "embed part"],
        routes: Integer[Array, "tokens chosen"] | None,
        inputs: Float[Array, "features part"] | None,
    ) -> tuple[Float[Array, "embed part"], Int[Array, "tokens chosen"] | None]:
        config, dtype, own = layer.config, layer.compute_dtype, None
        product, _ = self.apply(layer, layer.normed("mlp_norm", x), None)
        change = layer.layout.outer(product, dtype=dtype)
        if self.experts:
            # The router reads the residual stream, whose norm has other factors.
            read = rms_norm(x, layer.router_scale[...] * config.embed_dim**-0.5, config.norm_eps)
            product, own = self.experts.apply(layer, layer.normed("experts_norm", x), routes, read)
            of_experts = layer.layout.outer(product, dtype=dtype)
            change = layer.normed("shared_out_norm", change) + layer.normed("experts_out_norm", of_experts)
        x = x + layer.normed("mlp_out_norm", change)
        if inputs is not None:
            gate = ACTIVATIONS[config.activation](layer.project(("layer_gate",), x)[0])
            x = x + layer.normed("layer_out_norm", layer.project(("layer_output",), gate * inputs)[0])
        return x * jax.lax.stop_gradient(layer.layer_scalar[...])[:, None], own

    def used(self, tokens: int | float) -> int | float:
        return self.experts.used(tokens) if self.experts else 1.0


def read(values: Mapping[str, Any], sizes: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Returns fields of `DecoderConfig` from keys that only Gemma 4 has.

    Raises:
        ValueError: a value is not supported. The message names the key.
    """
    layers, window = sizes["layers"], values["sliding_window"]
    kinds = _kinds(values, layers, where)
    if (ways := values["use_bidirectional_attention"]) not in (None, False, "vision"):
        raise ValueError(
            f"{where}: use_bidirectional_attention={ways!r} is not supported, because tokens would attend to later tokens; remove the key"
        )
    own = _count(values, "hidden_size_per_layer_input", where)
    if own and (rows := values["vocab_size_per_layer_input"]) != sizes["vocab_size"]:
        raise ValueError(
            f"{where}: vocab_size_per_layer_input={rows!r} must be vocab_size={sizes['vocab_size']}, because each token needs both embeddings"
        )
    kv_heads, head_dim = _full_sizes(values, kinds, sizes, where)
    values_are_keys = checked(values, "attention_k_eq_v", bool, where)
    near = Attention(is_near=True, value_norm=True)
    full = Attention(kv_heads, head_dim, value_norm=True, keys_are_values=values_are_keys)
    of_kind = {NEAR: near, FULL: full}
    shared = _count(values, "num_kv_shared_layers", where)
    first = layers - shared
    if lost := set(kinds[first:]) - set(kinds[: max(first, 0)]):
        raise ValueError(
            f"{where}: num_kv_shared_layers={shared} leaves no layer {min(lost)!r} with keys and values among the first {max(first, 0)} layers; lower it"
        )
    hidden, experts, fields, (rope, *others) = sizes["mlp_dim"], None, dict[str, Any](), sizes["ropes"]
    if values.get("enable_moe_block") and checked(values, "enable_moe_block", bool, where):
        counts = ({key: None, **values} for key in ("num_experts", "top_k_experts", "moe_intermediate_size"))
        count, chosen, fields["mlp_dim"] = (checked(given, next(iter(given)), int, where) for given in counts)
        experts = Experts(count, chosen, True, expert_scale=True)
    wide = hidden * 2 if checked(values, "use_double_wide_mlp", bool, where) else hidden
    return fields | {
        "mixers": tuple(replace(of_kind[kind], shares=layer >= first) for layer, kind in enumerate(kinds)),
        "mlps": tuple(Gemma4Mlp(hidden if layer < first else wide, experts) for layer in range(layers)),
        "windows": tuple(window if kind == NEAR else 0 for kind in kinds) if NEAR in kinds else (),
        "ropes": (replace(rope, head_dim=head_dim), *others),
        "rope_of_layer": tuple(int(kind == NEAR) for kind in kinds),
        "layer_embed_dim": own,
        "embed_scale": sizes["embed_dim"] ** 0.5,
    }


def _kinds(values: Mapping[str, Any], layers: int, where: object) -> Sequence[str]:
    if (kinds := values["layer_types"]) is None:
        return [FULL if (layer + 1) % 6 == 0 or layer + 1 == layers else NEAR for layer in range(layers)]
    if kinds[-1] != FULL:
        raise ValueError(
            f"{where}: layer_types ends with {kinds[-1]!r}, but transformers computes the last layer as {FULL!r}; write {FULL!r} there"
        )
    return kinds


def _count(values: Mapping[str, Any], key: str, where: object) -> int:
    """Returns a number that may be 0. It is 0 if the family does not read the key."""
    found = values.get(key, 0)
    if type(found) is not int or found < 0:
        raise ValueError(f"{where}: {key} is {found!r}; it must be an int, 0 or above")
    return found


def _full_sizes(
    values: Mapping[str, Any], kinds: Sequence[str], sizes: Mapping[str, Any], where: object
) -> tuple[int, int]:
    """Returns the number of key heads and the size of a head in layers without a window."""
    if (listed := values["per_layer_config"]) is None:
        of_full = {"head_dim": values["global_head_dim"]}
        if values["attention_k_eq_v"] and values["num_global_key_value_heads"] is not None:
            of_full["num_key_value_heads"] = values["num_global_key_value_heads"]
        listed = {str(layer): of_full for layer, kind in enumerate(kinds) if kind == FULL}
    found = [listed.get(str(layer), {}) for layer in range(len(kinds))]
    of_kind = {FULL: found[kinds.index(FULL)], NEAR: {}}
    for layer, (kind, given) in enumerate(zip(kinds, found, strict=True)):
        if given != of_kind[kind] or set(given) - {"head_dim", "num_key_value_heads"}:
            raise ValueError(
                f"{where}: per_layer_config has {given!r} for layer {layer} ({kind}), which is not supported: only {FULL!r} layers may have "
                "another head_dim and num_key_value_heads, and all of them the same"
            )
    whole = {"head_dim": sizes["head_dim"], "num_key_value_heads": sizes["kv_heads"], **of_kind[FULL]}
    heads = checked(whole, "num_key_value_heads", int, where)
    if sizes["heads"] % heads:
        raise ValueError(
            f"{where}: num_key_value_heads={heads} of {FULL!r} layers must divide num_attention_heads={sizes['heads']}"
        )
    return heads, checked(whole, "head_dim", int, where)


def write(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json that `read` reads, in both notations of transformers."""
    kinds = [NEAR if mixer.is_near else FULL for mixer in config.mixers]
    full, (rope, near) = config.mixers[kinds.index(FULL)], config.ropes
    of_full = {"head_dim": full.head_dim, "num_key_value_heads": full.kv_heads}
    hidden, experts = config.mlps[0].hidden, config.experts
    described = {
        "layer_types": kinds,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads if full.keys_are_values else None,
        "per_layer_config": {str(layer): of_full for layer, kind in enumerate(kinds) if kind == FULL},
        "attention_k_eq_v": full.keys_are_values,
        "num_kv_shared_layers": sum(mixer.shares for mixer in config.mixers),
        "intermediate_size": hidden,
        "use_double_wide_mlp": config.mlps[-1].hidden > hidden,
        "rope_scaling": None,
        "rope_parameters": {
            FULL: {"rope_type": "proportional" if rope.proportional else "default", "rope_theta": rope.theta},
            NEAR: {"rope_type": "default", "rope_theta": near.theta},
        },
    }
    if rope.proportional:
        described["rope_parameters"][FULL]["partial_rotary_factor"] = rope.share
    if config.family == "gemma4_text":
        described |= {
            "hidden_size_per_layer_input": config.layer_embed_dim,
            "vocab_size_per_layer_input": config.vocab_size,
            "enable_moe_block": experts is not None,
            "top_k_experts": experts and experts.chosen,
            "moe_intermediate_size": experts and config.mlp_dim,
        }
    return described
