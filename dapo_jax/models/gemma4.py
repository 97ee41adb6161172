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
from dapo_jax.models.gated import ACTIVATIONS, Gated
from dapo_jax.models.parameters import Parameter, norm
from dapo_jax.models.projections import rms_norm

NEAR, FULL = "sliding_attention", "full_attention"

_OF_ONE_SIZE = {
    "tie_word_embeddings": True, "vocab_size": 262_144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": None, "per_layer_config": None, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
    "sliding_window": 512, "layer_types": None, "final_logit_softcapping": None, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False, "use_bidirectional_attention": None, "rope_theta": None,
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
class Gemma4Mlp(Gated):
    """An MLP, experts next to it if there are any, the layer's own embeddings if there are any, and a factor of the residual stream."""

    experts: Experts | None = None
    """The experts next to the MLP. `Architecture.mlp_dim` is the number of hidden features of each, and `dim` the number of the MLP."""

    def parameters(self, config: Architecture) -> dict[str, Parameter]:
        embed, own, found = config.embed_dim, config.layer_embed_dim, super().parameters(config)
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
            deep = own * 2 * config.layers
            found |= {
                "layer_gate": Parameter(shape=(own, embed), axes=("features", "embed"), fan_in=embed, tensor="per_layer_input_gate.weight"),
                "layer_output": Parameter(shape=(embed, own), axes=("embed", "features"), fan_in=deep, tensor="per_layer_projection.weight"),
                "layer_out_norm": norm(config, embed, tensor="post_per_layer_input_norm.weight"),
            }  # fmt: skip
        found["layer_scalar"] = Parameter(
            shape=(1,), axes=("features",), start=1.0, float32=True, is_trained=False, tensor="layer_scalar"
        )
        return found

    @property
    def prefix(self) -> str:
        return "shared_" if self.experts else ""

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


def read(values: Mapping[str, Any], sizes: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Returns fields of `DecoderConfig` from keys that only Gemma 4 has. `sizes` has the fields of all families.

    Raises:
        ValueError: a value is not supported. The message names the key.
    """
    layers, (rope, *others), hidden = sizes["layers"], sizes["ropes"], sizes["mlp_dim"]
    kinds = [NEAR if near else FULL for near in sizes["rope_of_layer"]]
    if kinds[-1] != FULL:
        raise ValueError(
            f"{where}: layer_types ends with {NEAR!r}, but transformers computes the last layer as {FULL!r}; write {FULL!r} there"
        )
    if (ways := values["use_bidirectional_attention"]) not in (None, False, "vision"):
        raise ValueError(
            f"{where}: use_bidirectional_attention={ways!r} is not supported, because tokens would attend to later tokens; remove the key"
        )
    # These numbers may be 0, which `checked` refuses. Some families do not read the first.
    own, shared = (
        values.get(key) and checked(values, key, int, where)
        for key in ("hidden_size_per_layer_input", "num_kv_shared_layers")
    )
    if own and (rows := values["vocab_size_per_layer_input"]) != sizes["vocab_size"]:
        raise ValueError(
            f"{where}: vocab_size_per_layer_input={rows!r} must be vocab_size={sizes['vocab_size']}, because each token needs both embeddings"
        )
    first = max(layers - shared, 0)
    if lost := set(kinds[first:]) - set(kinds[:first]):
        raise ValueError(
            f"{where}: num_kv_shared_layers={shared} leaves no layer {min(lost)!r} with keys and values among the first {first} layers; lower it"
        )
    kv_heads, head_dim = _full_sizes(values, kinds, sizes, where)
    values_are_keys = checked(values, "attention_k_eq_v", bool, where)
    of_kind = {
        NEAR: Attention(is_near=True, value_norm=True),
        FULL: Attention(kv_heads, head_dim, value_norm=True, keys_are_values=values_are_keys),
    }
    experts, fields = None, dict[str, Any]()
    if values.get("enable_moe_block") and checked(values, "enable_moe_block", bool, where):
        counts = ({key: None, **values} for key in ("num_experts", "top_k_experts", "moe_intermediate_size"))
        count, chosen, fields["mlp_dim"] = (checked(given, next(iter(given)), int, where) for given in counts)
        experts = Experts(count, chosen, True, expert_scale=True)
    wide = hidden * 2 if checked(values, "use_double_wide_mlp", bool, where) else hidden
    return fields | {
        "mixers": tuple(replace(of_kind[kind], shares=layer >= first) for layer, kind in enumerate(kinds)),
        "mlps": tuple(Gemma4Mlp(hidden if layer < first else wide, experts) for layer in range(layers)),
        "ropes": (replace(rope, head_dim=head_dim), *others),
        "layer_embed_dim": own or 0,
        "embed_scale": sizes["embed_dim"] ** 0.5,
    }


def _full_sizes(
    values: Mapping[str, Any], kinds: Sequence[str], sizes: Mapping[str, Any], where: object
) -> tuple[int, int]:
    """Returns the number of key heads and the size of a head in layers without a window."""
    of_full = {"head_dim": values["global_head_dim"]}
    if values["attention_k_eq_v"] and values["num_global_key_value_heads"] is not None:
        of_full["num_key_value_heads"] = values["num_global_key_value_heads"]
    if (listed := values["per_layer_config"]) is not None:
        of_full = listed.get(str(kinds.index(FULL)), {})
        for layer, kind in enumerate(kinds):
            given = listed.get(str(layer), {})
            if given != (of_full if kind == FULL else {}) or set(given) - {"head_dim", "num_key_value_heads"}:
                raise ValueError(
                    f"{where}: per_layer_config has {given!r} for layer {layer} ({kind}), which is not supported: only {FULL!r} layers may have "
                    "another head_dim and num_key_value_heads, and all of them the same"
                )
    whole = {"head_dim": sizes["head_dim"], "num_key_value_heads": sizes["kv_heads"], **of_full}
    heads = checked(whole, "num_key_value_heads", int, where)
    if sizes["heads"] % heads:
        raise ValueError(
            f"{where}: num_key_value_heads={heads} of {FULL!r} layers must divide num_attention_heads={sizes['heads']}"
        )
    return heads, checked(whole, "head_dim", int, where)


def write(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json that `read` reads, in both notations of transformers."""
    kinds = [NEAR if mixer.is_near else FULL for mixer in config.mixers]
    full, hidden, experts = config.mixers[kinds.index(FULL)], config.mlps[0].dim, config.experts
    of_full = {"head_dim": full.head_dim, "num_key_value_heads": full.kv_heads}
    described = {
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads if full.keys_are_values else None,
        "per_layer_config": {str(layer): of_full for layer, kind in enumerate(kinds) if kind == FULL},
        "attention_k_eq_v": full.keys_are_values,
        "num_kv_shared_layers": sum(mixer.shares for mixer in config.mixers),
        "intermediate_size": hidden,
        "use_double_wide_mlp": config.mlps[-1].dim > hidden,
        # These keys would describe one rotation of all layers.
        **dict.fromkeys(("rope_scaling", "partial_rotary_factor")),
    }
    if config.family == "gemma4_text":
        described |= {
            "hidden_size_per_layer_input": config.layer_embed_dim,
            "vocab_size_per_layer_input": config.vocab_size,
            "enable_moe_block": experts is not None,
            "top_k_experts": experts and experts.chosen,
            "moe_intermediate_size": experts and config.mlp_dim,
        }
    return described
