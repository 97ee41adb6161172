"""Reads and writes model folders in the Hugging Face layout: config.json and safetensors files.

Tensor names and orientations are the same as in transformers' Llama, Qwen2 and Qwen3, so transformers can load these folders.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flax import nnx
from jaxtyping import PyTree

from dapo_jax.models.families import describe, understand
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.safetensors_files import (
    SafetensorsFolder,
    check_dtype,
    read_json,
    write_json,
    write_tensors,
)
from dapo_jax.models.tensors import ByRows, Tensor, exported, place, unread
from dapo_jax.storage import path_of

CONFIG = "config.json"
NOT_LOADED = (
    "tensors of the image encoder or of additional heads are not loaded, because only the text model is used"
)


def load_model(
    folder: str | os.PathLike[str],
    config: DecoderConfig | None = None,
    *,
    shardings: Callable[[nnx.State], PyTree] | None = None,
    dtype: str = "float32",
    by_rows: ByRows | None = None,
    apart: bool = False,
) -> tuple[DecoderConfig, nnx.State]:
    """Loads a model folder tensor by tensor. The tensors may be float32, float16 or bfloat16.

    Args:
        folder: folder with config.json, and with model.safetensors or several shards and model.safetensors.index.json. If the
            folder is in a bucket (`dapo_jax.storage`), only the needed byte ranges are read.
        config: the result of `read_config`, possibly with a larger `vocab_multiple`. None: config.json is read.
        shardings: a function from the shapes of all parameters to their shardings. None: all parameters are on the default device.
        dtype: dtype of the parameters in memory, except norms, which are always float32.
        by_rows: pass `dapo_jax.parallel.sharding.read_by_rows` for a folder in a bucket, so that no two processes read the same rows.
        apart: store the arrays of each layer separately, as in `unstacked`. False: layers are stacked.

    Raises:
        ValueError: a file is missing or damaged, or the decoder does not support the model. The message names
            the file and the key or tensor.
    """
    config = config or read_config(folder)
    file = weights_of(folder, config)
    if file.skipped:
        warnings.warn(f"{file.where}: {file.skipped} {NOT_LOADED}", stacklevel=2)
    return config, place(config, file, shardings=shardings, dtype=dtype, by_rows=by_rows, apart=apart)


def weights_of(folder: str | os.PathLike[str], config: DecoderConfig) -> SafetensorsFolder:
    """Returns the tensors of a folder that the decoder may read, without layers that predict further tokens. Raises the errors of `SafetensorsFolder`."""
    return SafetensorsFolder(path_of(folder), unread=unread(config))


def read_config(folder: str | os.PathLike[str]) -> DecoderConfig:
    """Loads the `DecoderConfig` from a folder's config.json.
    Raises ValueError if config.json is missing, is not JSON, lacks a key, or describes an unsupported model."""
    path = path_of(folder) / CONFIG
    config = understand(described := read_json(path), path)
    decides = config.wrapped and described.get("tie_word_embeddings") not in (None, config.tied_embeddings)
    if decides or config.experts:
        with suppress(ValueError):  # As in transformers, the file decides. Without weights, config.json does.
            names = SafetensorsFolder(path.parent).shapes
            fused = any(name.endswith(".experts.gate_up_proj") for name in names)
            tied = "lm_head.weight" not in names if decides else config.tied_embeddings
            return replace(config, tied_embeddings=tied, fused_experts=fused)
    return config


def save_model(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: nnx.State,
    *,
    adapters: nnx.State | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 2**30,
    token_ids: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Writes a model folder that `load_model` and transformers can load, and returns the size of its tensors in bytes.

    Args:
        folder: target folder, which may be in a bucket (`dapo_jax.storage`). It is created if necessary, and a model in it is replaced.
        config: sizes and architecture options.
        params: the decoder's parameters, on any devices. They are gathered on the host one tensor at a time.
        adapters: adapters to merge into their matrices.
        dtype: dtype of the tensors in the files: float32, float16 or bfloat16.
        max_shard_bytes: maximum size of a file.
        token_ids: ids of special tokens by their keys in config.json, such as `eos_token_id`.
    """
    described, tensors = describe(config, dtype=dtype), list(exported(config, params, adapters))
    config_json = described | dict(token_ids)
    return write_model(folder, config_json, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)


def write_model(
    folder: str | os.PathLike[str],
    described: dict[str, Any],
    tensors: Sequence[Tensor],
    *,
    dtype: str,
    max_shard_bytes: int = 5 * 2**30,
) -> int:
    """Writes tensors, and then config.json with the content `described`. Returns the size of the tensors in bytes.

    config.json is written last, so that an interrupted export is not mistaken for a model.
    """
    check_dtype(dtype)  # before anything is removed, so that an invalid dtype leaves an earlier model intact
    path = path_of(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).unlink(missing_ok=True)
    written = write_tensors(path, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
    write_json(path / CONFIG, described)
    return written
