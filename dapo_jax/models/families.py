"""Converts between a Hugging Face config.json and `DecoderConfig`.

The Llama, Qwen2 and Qwen3 models in transformers use a fixed set of keys. Each of these keys is converted, and a
value that the decoder does not support raises an error. Other keys, such as names and versions, are ignored.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import RopeScaling

FAMILIES = ("llama", "qwen2", "qwen3")
WHAT_LOADS = "docs/bring_your_model.md lists the supported models"

_FIELDS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}
"""The key in config.json for each field of `DecoderConfig`."""

_COVERED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "quantization_config": (),
    "auto_map": (),
    # Importance ratios compare log-probabilities, which must not depend on dropout.
    "attention_dropout": (0.0,),
}
"""Supported values of the config.json keys that change the network. null is always supported."""

_ORIGINAL = "original_max_position_embeddings"
_SCALING_KINDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
}
"""The keys of each kind of RoPE scaling in config.json. `RopeScaling` has fields with the same names, except original_max_positions for `_ORIGINAL`."""
_NEUTRAL = {"partial_rotary_factor": 1.0, "truncate": True}
"""RoPE settings that have no effect at these values."""


def family_of(config: DecoderConfig) -> str:
    """Returns the model_type that config.json contains for this decoder.

    Raises:
        ValueError: no model family has this combination of options.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError(
            "no model family has both qkv_bias (Qwen2) and qk_norm (Qwen3), so config.json cannot describe this decoder"
        )
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def describe(config: DecoderConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """Returns the content of a decoder's config.json. RoPE settings are included in the formats of both transformers 4 and 5."""
    family = family_of(config)
    described = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    scaling = None
    if config.rope_scaling is not None:
        ours = {**vars(config.rope_scaling), _ORIGINAL: config.rope_scaling.original_max_positions}
        fields = {key: ours[key] for key in _SCALING_KINDS[config.rope_scaling.kind]}
        scaling = {"rope_type": config.rope_scaling.kind, **_present(fields)}
    return described | {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "dtype": dtype,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def understand(described: Mapping[str, Any], where: object) -> DecoderConfig:
    """Converts the content of a config.json to a `DecoderConfig`. `where` is the file's path for error messages.

    Raises:
        ValueError: a key is missing, or the decoder does not support its value.
    """
    family = described.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type {family!r} is not one of {', '.join(FAMILIES)}. {WHAT_LOADS}")
    _check_supported(described, family, where)
    rope = _rope(described, where)
    described = {**_family_defaults(described, family), **_present(described)}
    if missing := [key for key in _FIELDS.values() if key not in described]:
        raise ValueError(f"{where} lacks the key {missing[0]!r}")
    fields = {ours: described[theirs] for ours, theirs in _FIELDS.items()}
    for ours, value in fields.items():
        kind = bool if ours == "tied_embeddings" else float if ours == "norm_eps" else int
        if type(value) is not kind or (kind is not bool and value <= 0):
            needed = "true or false" if kind is bool else f"a positive {kind.__name__}"
            raise ValueError(f"{where}: {_FIELDS[ours]} is {value!r}; it must be {needed}")
    try:
        return DecoderConfig(
            **fields,
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=_scaling(rope, described["max_position_embeddings"]),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _present(described: Mapping[str, Any]) -> dict[str, Any]:
    """Removes keys whose value is null, because null means the same as a missing key."""
    return {key: value for key, value in described.items() if value is not None}


def _family_defaults(described: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Returns transformers' default values of keys that are missing in older files."""
    heads, width = described.get("num_attention_heads"), described.get("hidden_size")
    head_dim = 128 if family == "qwen3" else width // heads if heads and width else None
    return _present({"tie_word_embeddings": False, "num_key_value_heads": heads, "head_dim": head_dim})


def _check_supported(described: Mapping[str, Any], family: str, where: object) -> None:
    for key, covered in _COVERED_VALUES.items():
        value = described.get(key)
        if value is not None and value not in covered:
            known = f" (only {' or '.join(map(repr, covered))})" if covered else "; remove the key"
            raise ValueError(f"{where}: {key}={value!r} is not supported{known}. {WHAT_LOADS}")
    if odd := [kind for kind in described.get("layer_types") or () if kind != "full_attention"]:
        raise ValueError(f"{where}: layer_types has {odd[0]!r} (only 'full_attention' loads). {WHAT_LOADS}")
    covered = f"{family.capitalize()}ForCausalLM"
    named = described.get("architectures") or [covered]
    if named != [covered]:
        raise ValueError(f"{where}: architectures {named!r} is not supported (only {covered}). {WHAT_LOADS}")


def _rope(described: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Returns the RoPE settings from rope_parameters (transformers 5), or from rope_theta and rope_scaling (transformers 4)."""
    notations = [described.get(key) for key in ("rope_parameters", "rope_scaling")]
    found = [_completed(rope, described) for rope in notations if rope] or [_completed({}, described)]
    if found[0] != found[-1]:
        raise ValueError(f"{where}: rope_parameters {found[0]} and rope_scaling {found[1]} differ; keep one")
    rope = found[0]
    kind = rope["rope_type"]
    if kind != "default" and kind not in _SCALING_KINDS:
        raise ValueError(f"{where}: rope_type {kind!r} is not one of default, {', '.join(_SCALING_KINDS)}")
    # config.json may contain the original context length even if its type of scaling does not use it.
    known = {*_SCALING_KINDS.get(kind, ()), "rope_type", "rope_theta", _ORIGINAL, *_NEUTRAL}
    for key, value in rope.items():
        if key not in known or value != _NEUTRAL.get(key, value):
            raise ValueError(f"{where}: {key}={value!r} with rope_type {kind!r} is not supported")
    if kind != "default" and "factor" not in rope:
        raise ValueError(f"{where} lacks the key 'factor', which rope_type {kind!r} needs")
    return rope


def _completed(rope: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the RoPE settings in `rope`. Missing settings are filled in from other keys of config.json, and from defaults."""
    inside = _present(rope)
    old_name = inside.pop("type", "default")
    elsewhere = _present(described.get("rope_parameters") or {}) | _present(described)
    kept = {key: elsewhere[key] for key in ("rope_theta", _ORIGINAL) if key in elsewhere}
    return {"rope_type": old_name, "rope_theta": 10_000.0, **kept, **inside}


def _scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = rope["rope_type"]
    if kind == "default":
        return None
    numbers: dict[str, Any] = {key: float(rope[key]) for key in _SCALING_KINDS[kind] if key in rope}
    if kind != "linear":
        numbers["original_max_positions"] = int(numbers.pop(_ORIGINAL, max_positions))
    return RopeScaling(kind=kind, **numbers)
