"""The families with latent attention, and GLM-4.5, whose experts are the same: their rows in the table of families, and the layers with experts in config.json."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dapo_jax.models.config_json import Family, checked
from dapo_jax.models.experts import Experts
from dapo_jax.models.gated import Gated
from dapo_jax.models.latent_attention import LatentAttention

_SIZES = {
    "rank": "kv_lora_rank", "plain_dim": "qk_nope_head_dim", "rotated_dim": "qk_rope_head_dim", "value_dim": "v_head_dim",
}  # fmt: skip
"""The key in config.json for each size of `LatentAttention`."""


def _read(values: Mapping[str, Any], fields: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Implements `Family.read` for latent attention. Some families have experts."""
    sizes = {ours: checked(values, key, int, where) for ours, key in _SIZES.items()}
    rank = None if values["q_lora_rank"] is None else checked(values, "q_lora_rank", int, where)
    mixer = LatentAttention(**sizes, query_rank=rank)
    found = {"mixers": (mixer,), "head_dim": mixer.rotated_dim, "kv_heads": fields["heads"]}
    return found | (_mlps(values, fields, where) if "mlps" in fields else {})


def _mixer_keys(config: Any) -> dict[str, Any]:
    """Returns the keys of the mixer."""
    mixer = config.mixers[0]
    found = {key: getattr(mixer, ours) for ours, key in _SIZES.items()}
    return found | {"q_lora_rank": mixer.query_rank, "qk_head_dim": mixer.key_dim}


def _mlps(values: Mapping[str, Any], fields: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Returns the MLP of each layer. Some layers have one MLP, and others have experts. All shared experts together are one MLP."""
    layers, first = fields["layers"], values["first_k_dense_replace"]
    if type(first) is not int or not 0 <= first <= layers:
        raise ValueError(
            f"{where}: first_k_dense_replace is {first!r}; it must be from 0 to the number of layers, {layers}"
        )
    kinds = values["mlp_layer_types"] or ["dense"] * first + ["sparse"] * (layers - first)
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise ValueError(
            f"{where}: mlp_layer_types={kinds!r} must have 'dense' or 'sparse' for each of {layers} layers"
        )
    (experts,) = fields["mlps"]
    if values["n_shared_experts"]:
        count = checked(values, "n_shared_experts", int, where)
        experts = replace(experts, shared_dim=count * fields["mlp_dim"])
    dense = Gated(checked(values, "intermediate_size", int, where)) if "dense" in kinds else None
    return {"mlps": tuple(experts if kind == "sparse" else dense for kind in kinds)}


def _mlp_keys(config: Any) -> dict[str, Any]:
    """Returns the keys that `_mlps` reads."""
    kinds = ["sparse" if isinstance(mlp, Experts) else "dense" for mlp in config.mlps]
    first = [*kinds, "sparse"].index("sparse")
    dense = [mlp.dim for mlp in config.mlps if isinstance(mlp, Gated)]
    described = {
        "n_shared_experts": config.experts.shared_dim // config.mlp_dim if config.experts else 0,
        "intermediate_size": dense[0] if dense else config.mlp_dim,
        "mlp_layer_types": kinds,
    }
    return described | ({} if "dense" in kinds[first:] else {"first_k_dense_replace": first})


def _write(config: Any) -> dict[str, Any]:
    return _mixer_keys(config) | _mlp_keys(config)


def _glm_fields(values: Mapping[str, Any], fields: Mapping[str, Any], where: object) -> dict[str, Any]:
    normed = checked(values, "use_qk_norm", bool, where)
    return _mlps(values, fields, where) | {"qk_norm": "head" if normed else "none"}


def _glm_keys(config: Any) -> dict[str, Any]:
    return _mlp_keys(config) | {"use_qk_norm": config.qk_norm == "head"}


_LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "mlp_layer_types": None,
}  # fmt: skip
_GLM = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}
_OF_EXPERTS: dict[str, Any] = {
    "experts": {"sigmoid": True, "choice_bias": True}, "further_layers": True, "written": {"num_nextn_predict_layers": 0},
    "tensors": {f"shared_{name}": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")},
}  # fmt: skip

LATENT_FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM", ignored=("auto_map",), **_OF_EXPERTS, defaults={**_LATENT, **_EXPERTS}, read=_read, write=_write,
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM", **_OF_EXPERTS, read=_read, write=_write,
        defaults={
            **_LATENT, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, **_EXPERTS, **_GLM, "n_routed_experts": 64,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
        },
    ),
    "youtu": Family(
        architecture="YoutuForCausalLM", defaults={**_LATENT, "tie_word_embeddings": True}, read=_read, write=_mixer_keys,
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM", **_OF_EXPERTS, read=_glm_fields, write=_glm_keys,
        defaults={
            **_EXPERTS, **_GLM, "n_routed_experts": 128, "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "num_key_value_heads": 8,
            "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": False, "use_qk_norm": False,
        },
    ),
}  # fmt: skip
