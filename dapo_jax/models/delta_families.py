"""The families with Gated DeltaNet layers: their rows in the table of families, and the mixers of their layers in config.json."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.config_json import Family, checked
from dapo_jax.models.gated_delta import GatedDelta

_DELTA, _FULL = "linear_attention", "full_attention"
_SIZES = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim", "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}  # fmt: skip
"""The key of each field of `GatedDelta`."""


def _read(
    values: Mapping[str, Any], fields: Mapping[str, Any], where: object, *, by_key_head: bool = False
) -> dict[str, Any]:
    """Returns the mixer of each layer, from layer_types or full_attention_interval."""
    kinds = values["layer_types"]
    if kinds is None:
        every = checked(values, "full_attention_interval", int, where)
        kinds = [_DELTA if (layer + 1) % every else _FULL for layer in range(fields["layers"])]
    if set(kinds) != {_DELTA, _FULL}:
        raise ValueError(f"{where}: layer_types must have {_DELTA!r} and at least one {_FULL!r}")
    sizes = {ours: checked(values, key, int, where) for ours, key in _SIZES.items()}
    delta = GatedDelta(**sizes, by_key_head=by_key_head)
    return {"mixers": tuple(delta if kind == _DELTA else ATTENTION for kind in kinds)}


def _write(config: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {"layer_types": [_FULL] * config.layers}
    for layer, mixer in enumerate(config.mixers):
        if isinstance(mixer, GatedDelta):
            keys["layer_types"][layer] = _DELTA
            keys |= {theirs: getattr(mixer, ours) for ours, theirs in _SIZES.items()}
    return keys


_LAYERS = {
    "head_dim": 256, "partial_rotary_factor": 0.25, "layer_types": None, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_EXPERTS = {
    "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8,
}  # fmt: skip
_ALIKE: dict[str, Any] = {
    "layer_types": (_FULL, _DELTA), "switches": {"qk_norm": "head", "norm_offset": 1.0, "attention_gate": True}, "write": _write,
}  # fmt: skip
_QWEN3_5: dict[str, Any] = {**_ALIKE, "ignored": ("mrope_interleaved", "mrope_section"), "read": _read}

DELTA_FAMILIES: Mapping[str, Family] = {
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM", defaults={"num_key_value_heads": 4, "attn_output_gate": True, **_LAYERS}, **_QWEN3_5
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM", defaults={"attn_output_gate": True, "num_experts": 256, **_EXPERTS, **_LAYERS}, experts={"shared_gate": True},
        **_QWEN3_5,
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM", experts={"shared_gate": True}, read=partial(_read, by_key_head=True), **_ALIKE,
        defaults={"num_experts": 512, **_EXPERTS, "num_experts_per_tok": 10, "norm_topk_prob": True, **_LAYERS},
    ),
}  # fmt: skip
"""The families by model_type."""
