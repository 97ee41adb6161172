"""Converts between a Hugging Face config.json and `DecoderConfig`.

A `Family` lists the keys that its class in transformers reads, with their values if they are absent. Each of these keys is converted, and a
value that the decoder does not support raises an error, as does a key of another family that changes the network. Other keys, such as names
and versions, are ignored. Null means the same as an absent key, except for the keys in `_NULLABLE`.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from dapo_jax.models import gemma4
from dapo_jax.models.config_json import (
    ORIGINAL_LENGTH,
    Family,
    checked,
    of_each_layer,
    period,
    present,
    rope_of,
    rope_settings,
    two_ropes,
)
from dapo_jax.models.delta_families import DELTA_FAMILIES
from dapo_jax.models.experts import Experts
from dapo_jax.models.latent_families import LATENT_FAMILIES
from dapo_jax.models.mamba_families import MAMBA_FAMILIES
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import Rope

WHAT_LOADS = "docs/bring_your_model.md lists the supported models"


_OUTPUT_NORMS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_GEMMA = {
    "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None,
}  # fmt: skip
_GEMMA_SWITCHES = {"norm_place": "both", "norm_offset": 1.0}
_GEMMA_NORMS = {**_OUTPUT_NORMS, "mlp_norm": "pre_feedforward_layernorm.weight"}
_GEMMA4: dict[str, Any] = {
    "full_every": 6, "two_ropes": True, "ignored": ("hidden_act",), "read": gemma4.read, "write": gemma4.write,
    "switches": {"norm_place": "both", "qk_norm": "head", "query_scale": 1.0}, "tensors": _GEMMA_NORMS,
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
}  # fmt: skip
_GATE_UP = {"gate": "mlp.gate_up_proj.weight", "up": "mlp.gate_up_proj.weight"}


def _of_gpt_oss(values: Mapping[str, Any], sizes: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Returns the fields that differ from other families with the same keys. Quantized weights are dequantized when they are read."""
    stored = values["quantization_config"] or {"quant_method": "mxfp4"}
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "mxfp4":
        raise ValueError(
            f"{where}: quantization_config={stored!r} is not supported (only quant_method 'mxfp4', or no quantization). {WHAT_LOADS}"
        )
    return {"output_bias": values["attention_bias"]}


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "qwen2": Family(architecture="Qwen2ForCausalLM", ignored=("sliding_window",), switches={"qkv_bias": True}),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", ignored=("sliding_window",), defaults={"head_dim": 128}, switches={"qk_norm": "head"}
    ),
    "mistral": Family(
        architecture="MistralForCausalLM", full_every=0,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "ministral3": Family(
        architecture="Ministral3ForCausalLM", full_every=0,
        defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": None, "llama_4_scaling_beta": None,
            "rope_scaling": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL_LENGTH: 16_384, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM", defaults={"rms_norm_eps": 1e-5},
        switches={"norm_place": "outputs", "qk_norm": "all"}, tensors=_OUTPUT_NORMS,
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM", full_every=4, two_ropes=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096, "layer_types": None},
        switches={"norm_place": "outputs", "qk_norm": "all"}, tensors=_OUTPUT_NORMS,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2e6, "sliding_window": None,
            "use_sliding_window": False, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 4,
        },
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM", full_every=2, ignored=("hidden_act",),
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        switches=_GEMMA_SWITCHES, tensors=_GEMMA_NORMS,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM", full_every=6, two_ropes=True, ignored=("hidden_act", "attn_logit_softcapping"),
        defaults={
            **_GEMMA, "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
        },
        switches={**_GEMMA_SWITCHES, "qk_norm": "head"}, tensors=_GEMMA_NORMS,
    ),
    "gemma4_text": Family(architecture="Gemma4ForCausalLM", defaults=gemma4.DEFAULTS, **_GEMMA4),
    "gemma4_unified_text": Family(
        architecture="Gemma4UnifiedForCausalLM", defaults=gemma4.UNIFIED, **_GEMMA4
    ),
    "granite": Family(architecture="GraniteForCausalLM", defaults=_GRANITE),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM", ignored=("attention_dropout",), written={"attention_dropout": 0.1},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
        },
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM", still_full=True,
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        switches={"norm_place": "outputs", "qk_norm": "head"}, tensors=_OUTPUT_NORMS,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM", full_every=0, ignored=("auto_map",),
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": 1.0, ORIGINAL_LENGTH: 4096},
        tensors={**dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj.weight"), **_GATE_UP},
    ),
    "glm4": Family(
        architecture="Glm4ForCausalLM", neighbours=True,
        defaults={
            "rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5,
        },
        switches={"norm_place": "both"},
        tensors={
            "attention_out_norm": "post_self_attn_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight",
            "mlp_out_norm": "post_mlp_layernorm.weight", **_GATE_UP,
        },
    ),
    "ernie4_5": Family(
        architecture="Ernie4_5ForCausalLM", neighbours=True,
        defaults={
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 500_000.0, "use_bias": False,
        },
    ),
    "hunyuan_v1_dense": Family(
        architecture="HunYuanDenseV1ForCausalLM", ignored=("use_qk_norm",), defaults={"rms_norm_eps": 1e-5, "alpha": None},
        switches={"qk_norm": "head", "qk_norm_after_rope": True},
        tensors={"query_norm": "self_attn.query_layernorm.weight", "key_norm": "self_attn.key_layernorm.weight"},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM", ignored=("sliding_window",), switches={"qk_norm": "head"},
        defaults={
            "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_local_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM", full_every=2, switches={"sinks": True}, experts={"biases": True}, read=_of_gpt_oss,
        tensors={"router": "mlp.router.weight"},
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "attention_bias": True, "sliding_window": 128,
            "layer_types": None, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "quantization_config": None,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, ORIGINAL_LENGTH: 4096},
        },
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM", switches={"qk_norm": "all"},
        defaults={"rms_norm_eps": 1e-5, "clip_qkv": None, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM", defaults={**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2},
        tensors={
            "router": "block_sparse_moe.router.layer.weight", **dict.fromkeys(("gate", "up"), "block_sparse_moe.input_linear.weight"),
            "down": "block_sparse_moe.output_linear.weight",
        },
    ),
    **DELTA_FAMILIES,
    **LATENT_FAMILIES,
    **MAMBA_FAMILIES,
}  # fmt: skip
"""The supported model families by model_type."""

WRAPPED = {
    "gemma3": ("Gemma3ForConditionalGeneration", ("gemma3_text",)),
    "gemma4": ("Gemma4ForConditionalGeneration", ("gemma4_text",)),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", ("gemma4_unified_text",)),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", ("qwen3_5_text",)),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",)),
    "mistral3": ("Mistral3ForConditionalGeneration", ("mistral", "ministral3")),
}
"""Models for images and text: their class and the families of their text_config. Only the text model is loaded."""

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

_NUMBERS = {
    "embedding_multiplier": "embed_scale",
    "attention_multiplier": "query_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
    "attn_logit_softcapping": "score_cap",
    "final_logit_softcapping": "logit_cap",
    "clip_qkv": "clip_qkv",
    "swiglu_limit": "gate_limit",
    "swiglu_alpha": "gate_alpha",
}
_OF_EXPERTS = {
    "shared_expert_intermediate_size": "shared_dim",
    "moe_shared_expert_intermediate_size": "shared_dim",
    "moe_latent_size": "latent",
    "routed_scaling_factor": "scale",
    "n_group": "groups",
    "topk_group": "chosen_groups",
}
"""The fields of `Experts` for keys that only some families read."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The keys for the number of experts on the hub, and in files that transformers 5 writes."""
_FLAGS = {
    "attention_bias": ("qkv_bias",),
    "attention_out_bias": ("output_bias",),
    "mlp_bias": ("mlp_bias",),
    "use_bias": ("qkv_bias", "output_bias", "mlp_bias"),
    "attn_output_gate": ("attention_gate",),
}
"""Fields of `DecoderConfig` for keys that only some families read."""

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
_NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")
"""Keys for which null means that there is no window, cap or latent, whatever their default."""

_COVERED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    **dict.fromkeys(_FLAGS, (False,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), (1.0,)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), ()),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "first_k_dense_replace"), (0,)),
    # Layers with experts and layers without do not fit one stack.
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "no_rope_layers": (),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "mamba_proj_bias": (False,),
    **dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), (True,)),
    "mamba_hidden_act": ("silu",),
    "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    "normalization_function": ("rmsnorm",),
    "position_embedding_type": ("rope",),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "quantization_config": (),
    "auto_map": (),
    # Importance ratios compare log-probabilities, which must not depend on dropout.
    "attention_dropout": (0.0,),
}  # fmt: skip
"""Supported values of keys that change the network, in families that do not read the key. null is always supported."""


def describe(config: DecoderConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """Returns the content of a decoder's config.json. RoPE settings are included in the formats of both transformers 4 and 5.
    Raises ValueError if the family of the decoder has no keys for some of its options."""
    family = FAMILIES[config.family]
    described: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in _fields(family).items()}
    reads, (rope, *others) = family.defaults, config.ropes
    described |= {key: getattr(config, ours) for key, ours in _NUMBERS.items() if key in reads}
    described |= {key: getattr(config, ours[0]) for key, ours in _FLAGS.items() if key in reads}
    if "query_pre_attn_scalar" in reads and config.query_scale is not None:
        scalar = round(config.query_scale**-2, 9)
        described["query_pre_attn_scalar"] = int(scalar) if scalar.is_integer() else scalar
    if "sliding_window" in reads:
        # A window that no layer has turns the rotation of all layers off in some families.
        kept = reads["sliding_window"] if family.still_full and any(config.rope_of_layer) else None
        described["sliding_window"] = max(config.windows, default=0) or kept
    if "layer_types" in reads:
        windows = config.windows or (0,) * config.layers
        described["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    if "no_rope_layers" in reads:
        described["no_rope_layers"] = [1 - turn for turn in config.rope_of_layer or (0,) * config.layers]
        described["use_sliding_window"] = any(config.windows)
    if "position_embedding_type" in reads:
        described["position_embedding_type"] = "nope" if rope is None else "rope"
    if config.experts is not None:
        described |= {key: config.experts.count for key in _COUNTS if key in reads}
        described["num_experts_per_tok"] = config.experts.chosen
        described |= {"norm_topk_prob": config.experts.normalize} if "norm_topk_prob" in reads else {}
        described |= {
            key: getattr(config.experts, ours) or None for key, ours in _OF_EXPERTS.items() if key in reads
        }
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation)
    settings = rope_settings(rope or Rope(), reads)
    if config.query_growth is not None:
        settings["llama_4_scaling_beta"], settings[ORIGINAL_LENGTH] = config.query_growth
    outside = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in settings.items() if key not in outside}
    parameters = settings
    if family.two_ropes:
        near = rope_settings(others[0] or Rope(), reads)
        parameters = {"full_attention": settings, "sliding_attention": near}
        if "rope_local_base_freq" in reads:
            described["rope_local_base_freq"] = near["rope_theta"]
    described |= {key: settings[key] for key in ("partial_rotary_factor", ORIGINAL_LENGTH) if key in settings}
    described |= {
        "model_type": config.family,
        "architectures": [family.architecture],
        "attention_dropout": 0.0,
        _activation_key(family): activation,
        "torch_dtype": dtype,
        "dtype": dtype,
        "rope_theta": settings["rope_theta"],
        "rope_scaling": None if settings["rope_type"] == "default" else scaling,
        "rope_parameters": parameters,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **family.written,
    }
    described.setdefault("attention_bias", False)
    described |= family.write(config) if family.write else {}
    found = understand(described, "config.json")
    config = replace(config.base, vocab_multiple=1, wrapped=False, fused_experts=False).for_length(2**62)
    if lost := [
        field.name for field in fields(config) if getattr(found, field.name) != getattr(config, field.name)
    ]:
        raise ValueError(
            f"models of the family {config.family} cannot have these values of {', '.join(lost)}: "
            f"{', '.join(repr(getattr(config, name)) for name in lost)}; config.json cannot describe this decoder"
        )
    return described


def understand(described: Mapping[str, Any], where: object) -> DecoderConfig:
    """Converts the content of a config.json to a `DecoderConfig`. `where` is the file's path for error messages.
    Raises ValueError if a key is missing, or the decoder does not support its value."""
    outer, described = described, _text_part(described, where)
    name = str(described.get("model_type"))
    if name not in FAMILIES:
        raise ValueError(f"{where}: model_type {name!r} is not one of {', '.join(FAMILIES)}. {WHAT_LOADS}")
    family = FAMILIES[name]
    _check_supported(described, family, where)
    heads, width = described.get("num_attention_heads"), described.get("hidden_size")
    values: dict[str, Any] = {
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        **present({"num_key_value_heads": heads}),
    }
    if isinstance(heads, int) and isinstance(width, int) and heads:
        values["head_dim"] = width // heads
    values |= {**family.defaults, **present(described)}
    values |= {key: None for key in _NULLABLE if key in described and described[key] is None}
    sizes = {}
    for ours, key in _fields(family).items():
        kind = bool if ours == "tied_embeddings" else float if ours == "norm_eps" else int
        sizes[ours] = checked(values, key, kind, where)
    found: dict[str, Any] = {**family.switches, "wrapped": outer is not described}
    found["activation"] = _ACTIVATIONS[values.get(_activation_key(family), "silu")]
    for key, ours in _NUMBERS.items():
        if key in family.defaults and values[key] is not None:
            found[ours] = checked(values, key, float, where)
    for key, biases in _FLAGS.items():
        if key in family.defaults:
            found |= dict.fromkeys(biases, checked(values, key, bool, where))
    if "query_pre_attn_scalar" in family.defaults:
        found["query_scale"] = checked(values, "query_pre_attn_scalar", float, where) ** -0.5
        found["embed_scale"] = sizes["embed_dim"] ** 0.5
    try:
        if "num_experts_per_tok" in family.defaults:
            found["mlps"] = (_experts(values, described, family, where),)
        found |= _layer_fields(values, described, family, sizes, where)
        found = {**sizes, **found}
        found |= family.read(values, found, where) if family.read else {}
        return DecoderConfig(family=name, **found)
    except ValueError as error:
        raise error if str(error).startswith(f"{where}") else ValueError(f"{where}: {error}") from error


def _text_part(described: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """Returns the text_config of a model for images and text, completed by keys outside it, or the whole config.json of a text model."""
    if (name := str(described.get("model_type"))) not in WRAPPED:
        return described
    architecture, inner = WRAPPED[name]
    text = described.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") not in inner:
        found = text.get("model_type") if isinstance(text, Mapping) else text
        raise ValueError(
            f"{where}: model_type {name!r} with a text_config of model_type {found!r} is not supported (only {' or '.join(inner)}). {WHAT_LOADS}"
        )
    if (named := described.get("architectures") or [architecture]) != [architecture]:
        raise ValueError(
            f"{where}: architectures {named!r} is not supported (only {architecture}). {WHAT_LOADS}"
        )
    outside = ("tie_word_embeddings", "quantization_config", "auto_map")
    return {**text, **{key: described.get(key) for key in outside if text.get(key) is None}}


def _fields(family: Family) -> dict[str, str]:
    keys = ("shared_intermediate_size", "moe_intermediate_size", "intermediate_size")
    eps = "layer_norm_epsilon" if "layer_norm_epsilon" in family.defaults else _FIELDS["norm_eps"]
    width = next(key for key in keys if key in family.defaults or key == keys[-1])
    return _FIELDS | {"mlp_dim": width, "norm_eps": eps}


def _activation_key(family: Family) -> str:
    keys = ("hidden_activation", "mlp_hidden_act", "hidden_act")
    return next(key for key in keys if key in family.defaults or key == keys[-1])


def _experts(
    values: Mapping[str, Any], described: Mapping[str, Any], family: Family, where: object
) -> Experts:
    reads = family.defaults
    keys = [key for key in _COUNTS if key in reads]
    given = [key for key in keys if described.get(key) is not None]
    counts = [checked(values, key, int, where) for key in given or keys[:1]]
    if counts[0] != counts[-1]:
        raise ValueError(
            f"{where}: num_experts={counts[0]} and num_local_experts={counts[1]} differ; keep one"
        )
    # If a family does not read the key, it computes a softmax over the chosen experts alone, which is the same as normalized probabilities.
    normalize = "norm_topk_prob" not in reads or checked(values, "norm_topk_prob", bool, where)
    others = {
        ours: checked(values, key, float if ours == "scale" else int, where)
        for key, ours in _OF_EXPERTS.items()
        if key in reads and values[key] is not None
    }
    chosen = checked(values, "num_experts_per_tok", int, where)
    return Experts(counts[0], chosen, normalize, **others, **family.experts)


def _check_supported(described: Mapping[str, Any], family: Family, where: object) -> None:
    for key, covered in _COVERED_VALUES.items():
        value = described.get(key)
        if key in family.defaults or key in family.ignored:
            continue
        if value is not None and value not in covered:
            known = f" (only {' or '.join(map(repr, covered))})" if covered else "; remove the key"
            raise ValueError(f"{where}: {key}={value!r} is not supported{known}. {WHAT_LOADS}")
    activation = described.get(key := _activation_key(family))
    if key in family.defaults and activation not in (None, *_ACTIVATIONS):
        raise ValueError(
            f"{where}: {key}={activation!r} is not supported (only {' or '.join(_ACTIVATIONS)}). {WHAT_LOADS}"
        )
    windowed = {"layer_types", "sliding_window"} <= set(family.defaults)
    supported = (*family.layer_types, "sliding_attention") if windowed else family.layer_types
    kinds = described.get("layer_types") or ()
    kinds = kinds if isinstance(kinds, list | tuple) else [kinds]
    if odd := [kind for kind in kinds if kind not in supported]:
        raise ValueError(
            f"{where}: layer_types has {odd[0]!r} (only {' or '.join(map(repr, supported))} loads). {WHAT_LOADS}"
        )
    named = described.get("architectures") or [family.architecture]
    if [str(name).replace("Ernie4_5_", "Ernie4_5") for name in named] != [family.architecture]:
        raise ValueError(
            f"{where}: architectures {named!r} is not supported (only {family.architecture}). {WHAT_LOADS}"
        )


def _layer_fields(
    values: Mapping[str, Any], described: Mapping[str, Any], family: Family, sizes: Mapping[str, Any], where: object
) -> dict[str, Any]:  # fmt: skip
    """Returns the fields of `DecoderConfig` for windows and rotations."""
    layers, reads = sizes["layers"], family.defaults
    window = values["sliding_window"] if "sliding_window" in reads else None
    window = None if window is None else checked(values, "sliding_window", int, where)
    turns = [1] * layers
    if "no_rope_layers" in reads:
        every = checked(values, "no_rope_layer_interval", int, where)
        turns = of_each_layer(values, "no_rope_layers", layers, where) or [
            int((i + 1) % every != 0) for i in range(layers)
        ]
        if odd := [turn for turn in turns if turn not in (0, 1)]:
            raise ValueError(f"{where}: no_rope_layers has {odd[0]!r}; its entries must be 0 or 1")
        window = window if checked(values, "use_sliding_window", bool, where) else None
    kinds = of_each_layer(values, "layer_types", layers, where) if "layer_types" in reads else None
    if kinds is None and "no_rope_layers" in reads:
        kinds = ["sliding_attention" if window and not turn else "full_attention" for turn in turns]
    if kinds is None:
        every = family.full_every
        if "sliding_window_pattern" in reads:
            every = period(values["sliding_window_pattern"], where)
        every = 1 if window is None and not family.two_ropes else every
        is_full = [every and (i + 1) % every == 0 for i in range(layers)]
        kinds = ["full_attention" if full else "sliding_attention" for full in is_full]
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and window is None:
        raise ValueError(
            f"{where}: layer_types has 'sliding_attention', but sliding_window is null; set it, or use 'full_attention' for all layers"
        )
    if window is not None and not family.full_every and window >= sizes["max_positions"]:
        sliding = [False] * layers  # a window that no sequence exceeds
    windows = tuple(window if slides else 0 for slides in sliding) if window and any(sliding) else ()
    made: dict[str, Any] = {"windows": windows}
    if family.two_ropes:
        made["ropes"] = two_ropes(values, described, family, sizes, where)
        made["rope_of_layer"] = tuple(map(int, sliding))
        return made
    if "ropes" in family.switches:
        return made
    rope, settings = rope_of(described, family, sizes, where)
    made["ropes"] = (rope,)
    if "position_embedding_type" in reads and values["position_embedding_type"] != "rope":
        made["ropes"] = (None,)
    if "llama_4_scaling_beta" in reads and "llama_4_scaling_beta" in settings:
        made["query_growth"] = (
            checked(settings, "llama_4_scaling_beta", float, where),
            checked({ORIGINAL_LENGTH: sizes["max_positions"], **settings}, ORIGINAL_LENGTH, int, where),
        )
    still = [not turn for turn in turns]
    if family.still_full:
        still = [window is not None and not slides for slides in sliding]
    if any(still):
        made["ropes"], made["rope_of_layer"] = (rope, None), tuple(map(int, still))
    return made
