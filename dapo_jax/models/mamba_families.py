"""The families with Mamba-2 layers: their rows in the table of families, and the kinds of their layers in config.json.

A layer of Nemotron-H has a mixer or an MLP, and a layer of Granite 4 has both.
"""

from collections.abc import Mapping
from typing import Any

from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.config_json import Family, checked
from dapo_jax.models.experts import Experts
from dapo_jax.models.gated import Gated
from dapo_jax.models.mamba import Mamba

_MAMBA, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")
_LETTERS = {**dict.fromkeys(_MAMBA, "M"), **dict.fromkeys(_ATTENTION, "*"), "mlp": "-", "moe": "E"}
"""The letter of each kind of layer in hybrid_override_pattern, by its names in layers_block_type. The first name of a letter is written."""

_NEMOTRON = {
    "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "state_dim": "ssm_state_size", "taps": "conv_kernel",
}  # fmt: skip
_GRANITE = {"heads": "mamba_n_heads", "groups": "mamba_n_groups", "state_dim": "mamba_d_state", "taps": "mamba_d_conv"}  # fmt: skip
"""The key of each field of `Mamba`."""


def _nemotron_layers(values: Mapping[str, Any], fields: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Returns the layers from layers_block_type, or from hybrid_override_pattern (transformers 4). As in transformers, num_hidden_layers has no effect."""
    names, pattern = values["layers_block_type"], values["hybrid_override_pattern"]
    if not (given := names or pattern):
        raise ValueError(f"{where} lacks the key 'layers_block_type' or 'hybrid_override_pattern'")
    letters = [_LETTERS.get(str(kind), str(kind)) for kind in given]
    if odd := [kind for kind in letters if kind not in _LETTERS.values()]:
        key, known = "layers_block_type" if names else "hybrid_override_pattern", " or ".join(_LETTERS)
        raise ValueError(f"{where}: {key} has {odd[0]!r} (only {known}, or their letters, loads)")
    kinds = {
        "M": (Mamba(**{ours: checked(values, key, int, where) for ours, key in _NEMOTRON.items()}), None),
        "*": (ATTENTION, None),
        "-": (None, Gated(checked(values, "intermediate_size", int, where))),
        "E": (None, fields["mlps"][0]),
    }
    mixers, mlps = zip(*(kinds[letter] for letter in letters), strict=True)
    return {"layers": len(letters), "mixers": mixers, "mlps": mlps}


def _nemotron_keys(config: Any) -> dict[str, Any]:
    letters = "".join(
        ("M" if isinstance(mixer, Mamba) else "*") if mixer else ("E" if isinstance(mlp, Experts) else "-")
        for mixer, mlp in zip(config.mixers, config.mlps, strict=True)
    )
    first = {letter: name for name, letter in reversed(_LETTERS.items())}
    keys: dict[str, Any] = {"hybrid_override_pattern": letters}
    keys["layers_block_type"] = [first[letter] for letter in letters]
    for kind in (*config.mixers, *config.mlps):
        if isinstance(kind, Mamba):
            keys |= {theirs: getattr(kind, ours) for ours, theirs in _NEMOTRON.items()}
        if isinstance(kind, Gated):
            keys["intermediate_size"] = kind.dim
    return keys


def _granite_layers(values: Mapping[str, Any], fields: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Returns the mixers from layer_types (absent: all layers have Mamba), and the MLP of all layers, which may have experts."""
    kinds, made = values["layer_types"] or _MAMBA[:1] * fields["layers"], {}
    if set(kinds) & set(_MAMBA):
        width = checked(values, "mamba_expand", int, where) * fields["embed_dim"]
        sizes = {ours: checked(values, key, int, where) for ours, key in _GRANITE.items()}
        head_dim = width // sizes["heads"]
        if width % sizes["heads"] or values["mamba_d_head"] not in ("auto", head_dim):
            raise ValueError(
                f"{where}: mamba_n_heads={sizes['heads']} x mamba_d_head={values['mamba_d_head']} must be mamba_expand x hidden_size = {width}"
            )
        mamba = Mamba(head_dim=head_dim, **sizes)
        made["mixers"] = tuple(mamba if kind in _MAMBA else ATTENTION for kind in kinds)
    if values["num_local_experts"] != 0:
        count = checked(values, "num_local_experts", int, where)
        chosen = checked({"num_experts_per_tok": 2, **values}, "num_experts_per_tok", int, where)
        made["mlps"] = (Experts(count, chosen, normalize=True, shared_dim=fields["mlp_dim"]),)
        made["mlp_dim"] = checked(values, "intermediate_size", int, where)
    return made


def _granite_keys(config: Any) -> dict[str, Any]:
    of_mamba = [isinstance(mixer, Mamba) for mixer in config.mixers]
    keys: dict[str, Any] = {"mamba_n_heads": 1, "mamba_d_head": "auto"}
    if any(of_mamba):
        mamba = config.mixers[of_mamba.index(True)]
        keys = {theirs: getattr(mamba, ours) for ours, theirs in _GRANITE.items()}
        expand = mamba.heads * mamba.head_dim // config.embed_dim
        keys |= {"mamba_d_head": mamba.head_dim, "mamba_expand": expand}
    if config.experts is None:
        keys |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    else:
        keys |= {"intermediate_size": config.mlp_dim, "shared_intermediate_size": config.experts.shared_dim}
    return keys | {"layer_types": [(_MAMBA if mamba else _ATTENTION)[0] for mamba in of_mamba]}


MAMBA_FAMILIES: Mapping[str, Family] = {
    "nemotron_h": Family(
        architecture="NemotronHForCausalLM", ignored=("attention_bias", "partial_rotary_factor"), read=_nemotron_layers, write=_nemotron_keys,
        switches={"mlp_gate": False, "ropes": (None,)}, experts={"sigmoid": True, "choice_bias": True},
        defaults={
            "num_hidden_layers": 1, "num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
            "layers_block_type": None, "hybrid_override_pattern": None, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
            "conv_kernel": 4, "intermediate_size": 21504, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None, "n_routed_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "n_group": 1, "topk_group": 1,
        },
        paths={
            "model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f", "model.layers": "backbone.layers", "self_attn.": "mixer.",
            "mlp.shared_expert.": "mixer.shared_experts.", "mlp.": "mixer.", "mamba.": "mixer.", "input_layernorm": "norm", "post_attention_layernorm": "norm",
        },
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM", layer_types=(*_MAMBA, *_ATTENTION), read=_granite_layers, write=_granite_keys,
        defaults={
            "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "shared_intermediate_size": 1024,
            "layer_types": None, "position_embedding_type": None, "num_local_experts": 8, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
        },
        paths={
            "mlp.gate.": "block_sparse_moe.router.layer.", "mlp.experts.{}.down_proj": "block_sparse_moe.output_linear",
            **dict.fromkeys(("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "block_sparse_moe.input_linear"),
            **dict.fromkeys(("mlp.down_proj", "mlp.shared_expert.down_proj"), "shared_mlp.output_linear"),
            **{f"mlp.{path}{name}_proj": "shared_mlp.input_linear" for path in ("", "shared_expert.") for name in ("gate", "up")},
        },
    ),
}  # fmt: skip
"""The families by model_type."""
