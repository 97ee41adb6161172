"""Model folders in the Hugging Face layout: config.json and model.safetensors, read and written.

Tensor names and orientations are those of transformers' Llama, Qwen2 and Qwen3, so a folder written here opens there.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dapo_jax.models.decoder import Decoder
from dapo_jax.models.presets import DecoderConfig

_FIELDS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}
"""Our field -> the key of config.json."""

_LAYER_TENSORS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_END_TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


def shapes_of(config: DecoderConfig) -> nnx.State:
    """The decoder's parameters as shapes: no memory is used."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[1]


def save_model(folder: str | os.PathLike[str], config: DecoderConfig, params: nnx.State) -> None:
    """Writes config.json and model.safetensors (float32) into `folder`, which is created if need be."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    described = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    described |= {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (Path(folder) / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    host = jax.device_get(nnx.to_pure_dict(params))
    tensors = {_END_TENSORS[name]: value for name, value in host["ends"].items()}
    for name, stacked in host["blocks"].items():
        for layer, value in enumerate(stacked):
            tensors[f"model.layers.{layer}.{_LAYER_TENSORS[name]}"] = _to_theirs(name, value)
    tensors = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in tensors.items()}
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def load_model(folder: str | os.PathLike[str]) -> tuple[DecoderConfig, nnx.State]:
    """Reads a model folder; parameters come back in float32 on the default device.

    Raises:
        ValueError: a file is missing or damaged, or the model is of a kind this decoder does not cover; the message names
            the file and the key or tensor.
    """
    config = read_config(folder)
    path = Path(folder) / "model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    params = shapes_of(config)
    pure = nnx.to_pure_dict(params)
    ends = {name: _take(tensors, _END_TENSORS[name], like.shape, path) for name, like in pure["ends"].items()}
    blocks = {}
    for name, like in pure["blocks"].items():
        theirs = _theirs_shape(name, like.shape[1:])
        names = [f"model.layers.{layer}.{_LAYER_TENSORS[name]}" for layer in range(config.layers)]
        found = [_take(tensors, tensor, theirs, path) for tensor in names]
        blocks[name] = np.stack([_to_ours(name, value, like.shape[1:]) for value in found])
    # Some publishers write a tied matrix twice.
    again = tensors.pop("lm_head.weight", None) if config.tied_embeddings else None
    if again is not None and not np.array_equal(again.astype(np.float32), ends["embedding"]):
        raise ValueError(
            f"{path}: lm_head.weight is not the embedding, as tie_word_embeddings in config.json has it"
        )
    if tensors:
        raise ValueError(f"{path} holds {sorted(tensors)[:3]}, which config.json does not call for")
    nnx.replace_by_pure_dict(params, jax.tree.map(jnp.asarray, {"ends": ends, "blocks": blocks}))
    return config, params


def read_config(folder: str | os.PathLike[str]) -> DecoderConfig:
    """Reads config.json.

    Raises:
        ValueError: it is missing, is not JSON, lacks a key, or describes another kind of model.
    """
    path = Path(folder) / "config.json"
    try:
        described: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read a model from {path}: {error}") from error
    kind = described.get("model_type")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{path}: model_type {kind!r} is not covered; llama, qwen2 and qwen3 are")
    # transformers 5 has all that is rotary under one key.
    rope: dict[str, Any] = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"{path}: rope_scaling {rope} is not covered")
    if "rope_theta" in rope:
        described["rope_theta"] = rope["rope_theta"]
    if described.get("head_dim") is None and {"hidden_size", "num_attention_heads"} <= described.keys():
        described["head_dim"] = described["hidden_size"] // described["num_attention_heads"]
    if missing := [key for key in _FIELDS.values() if key not in described]:
        raise ValueError(f"{path} lacks the key {missing[0]!r}")
    fields = {ours: described[theirs] for ours, theirs in _FIELDS.items()}
    fields |= {name: float(fields[name]) for name in ("rope_theta", "norm_eps")}
    return DecoderConfig(**fields, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")


def _take(tensors: dict[str, np.ndarray], name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"{path} lacks the tensor {name!r}")
    value = tensors.pop(name)
    if value.shape != shape:
        raise ValueError(f"{path}: {name} has shape {value.shape}, config.json calls for {shape}")
    return value.astype(np.float32)


def _inputs(name: str, shape: tuple[int, ...]) -> int:
    """Number of leading axes that are inputs: transformers stores [outputs, inputs], each flattened."""
    return 0 if len(shape) == 1 or name.endswith("_bias") else 2 if name == "output" else 1


def _theirs_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    split = _inputs(name, shape)
    flat = (int(np.prod(shape[split:])), int(np.prod(shape[:split])))
    return flat if split else flat[:1]


def _to_theirs(name: str, value: np.ndarray) -> np.ndarray:
    split = _inputs(name, value.shape)
    return value.reshape(int(np.prod(value.shape[:split])), -1).T if split else value.reshape(-1)


def _to_ours(name: str, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return value.T.reshape(shape) if _inputs(name, shape) else value.reshape(shape)
