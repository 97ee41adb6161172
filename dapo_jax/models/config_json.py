"""Converts between config.json of the Hugging Face layout and `DecoderConfig`.

transformers' Llama, Qwen2 and Qwen3 read a closed set of keys. Each of these is either converted, or refused by
name if the decoder does not support its value. Other keys (names, versions) are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import RopeScaling

FAMILIES = ("llama", "qwen2", "qwen3")
WHAT_LOADS = "docs/bring_your_model.md lists what loads"

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
"""The key of config.json for each field."""

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
"""Keys that change the network, and their supported values; null is always supported."""

_ORIGINAL = "original_max_position_embeddings"
_SCALING_KINDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
}
"""The rotary settings of each kind, which are fields of `RopeScaling`; the field of `_ORIGINAL` is original_max_positions."""
_NEUTRAL = {"partial_rotary_factor": 1.0, "truncate": True}
"""Rotary settings that change nothing at this value."""


def family_of(config: DecoderConfig) -> str:
    """Returns the model_type of a decoder.

    Raises:
        ValueError: no family has this combination of switches.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError(
            "no model family has both qkv_bias (Qwen2) and qk_norm (Qwen3); such a decoder has no config.json"
        )
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def describe(
    config: DecoderConfig,
    *,
    dtype: str = "float32",
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
) -> dict[str, Any]:
    """Returns the content of config.json, with rotary settings in the notations of transformers 4 and 5."""
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
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids) or None,
        "bos_token_id": bos_id,
        "pad_token_id": pad_id,
    }


def understand(described: Mapping[str, Any], where: object) -> DecoderConfig:
    """Returns the decoder that the content of a config.json describes; `where` is its path for messages.

    Raises:
        ValueError: a key is missing, or the decoder does not support its value.
    """
    family = described.get("model_type")
    if family not in FAMILIES:
        named = ", ".join(map(str, described.get("architectures") or ()))
        its = f"; its architecture is {named}" if named else ""
        raise ValueError(
            f"{where}: model_type {family!r} is not covered; llama, qwen2 and qwen3 are{its}; {WHAT_LOADS}"
        )
    _refuse_what_is_not_covered(described, family, where)
    rope = _rope(described, where)
    described = {**_family_defaults(described, family), **_present(described)}
    if missing := [key for key in _FIELDS.values() if key not in described]:
        raise ValueError(f"{where} lacks the key {missing[0]!r}")
    fields = {ours: described[theirs] for ours, theirs in _FIELDS.items()}
    for ours, value in fields.items():
        kind = bool if ours == "tied_embeddings" else float if ours == "norm_eps" else int
        if type(value) is not kind or (kind is not bool and value <= 0):
            noun = {bool: "true or false", float: "a positive number", int: "a positive integer"}[kind]
            raise ValueError(f"{where}: {_FIELDS[ours]} is {value!r}; it must be {noun}")
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
    """Removes nulls, which mean the same as absent keys."""
    return {key: value for key, value in described.items() if value is not None}


def _family_defaults(described: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Returns transformers' defaults of keys that older files lack."""
    heads, width = described.get("num_attention_heads"), described.get("hidden_size")
    head_dim = 128 if family == "qwen3" else width // heads if heads and width else None
    return _present({"tie_word_embeddings": False, "num_key_value_heads": heads, "head_dim": head_dim})


def _refuse_what_is_not_covered(described: Mapping[str, Any], family: str, where: object) -> None:
    for key, covered in _COVERED_VALUES.items():
        value = described.get(key)
        if value is not None and value not in covered:
            known = f"; {' or '.join(map(repr, covered))} is" if covered else "; the key must be absent"
            raise ValueError(f"{where}: {key}={value!r} is not covered{known}; {WHAT_LOADS}")
    if odd := [kind for kind in described.get("layer_types") or () if kind != "full_attention"]:
        raise ValueError(
            f"{where}: layer_types has {odd[0]!r}, which is not covered; 'full_attention' is; {WHAT_LOADS}"
        )
    covered = f"{family.capitalize()}ForCausalLM"
    named = described.get("architectures") or [covered]
    if named != [covered]:
        raise ValueError(f"{where}: architectures {named!r} is not covered; {covered} is; {WHAT_LOADS}")


def _rope(described: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Returns the rotary settings under rope_parameters (transformers 5), or rope_theta and rope_scaling."""
    notations = [described.get(key) for key in ("rope_parameters", "rope_scaling")]
    found = [_completed(rope, described) for rope in notations if rope] or [_completed({}, described)]
    if found[0] != found[-1]:
        raise ValueError(
            f"{where}: rope_parameters {found[0]} and rope_scaling {found[1]} differ; remove one of them"
        )
    rope = found[0]
    kind = rope["rope_type"]
    if kind != "default" and kind not in _SCALING_KINDS:
        raise ValueError(
            f"{where}: rope_type {kind!r} is not covered; default, {', '.join(_SCALING_KINDS)} are"
        )
    # Files may have the original context although their kind does not use it.
    known = {*_SCALING_KINDS.get(kind, ()), "rope_type", "rope_theta", _ORIGINAL, *_NEUTRAL}
    for key, value in rope.items():
        if key not in known or value != _NEUTRAL.get(key, value):
            raise ValueError(f"{where}: {key}={value!r} of rope_type {kind!r} is not covered")
    if kind != "default" and "factor" not in rope:
        raise ValueError(f"{where} lacks the key 'factor' of rope_type {kind!r}")
    return rope


def _completed(rope: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one notation with the keys outside of it and the defaults."""
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
