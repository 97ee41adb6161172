"""Reads and writes model folders in the Hugging Face layout: config.json and safetensors files.

Tensor names and orientations are the same as in transformers' Llama, Qwen2 and Qwen3, so transformers opens these folders.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flax import nnx
from jaxtyping import PyTree

from dapo_jax.models.config_json import describe, understand
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.safetensors_files import (
    SafetensorsFolder,
    check_dtype,
    read_json,
    write_json,
    write_tensors,
)
from dapo_jax.models.tensors import ByRows, Tensor, exported, place
from dapo_jax.storage import path_of

CONFIG = "config.json"


def load_model(
    folder: str | os.PathLike[str],
    config: DecoderConfig | None = None,
    *,
    shardings: Callable[[nnx.State], PyTree] | None = None,
    dtype: str = "float32",
    by_rows: ByRows | None = None,
    apart: bool = False,
) -> tuple[DecoderConfig, nnx.State]:
    """Reads a model folder tensor by tensor, stored in any float type.

    Args:
        folder: has config.json and model.safetensors, or several files and model.safetensors.index.json. Of a folder in a bucket
            (`dapo_jax.storage`), ranges are read.
        config: the result of `read_config`, perhaps with a larger `vocab_multiple`; None: reads it.
        shardings: returns the sharding of each parameter from their shapes; None: the default device.
        dtype: of the parameters in memory; norms are in float32.
        by_rows: `dapo_jax.parallel.sharding.read_by_rows` for a folder in a bucket, so that no two processes read the same rows.
        apart: each layer has its own arrays, as in `Decoder` with `apart`; False: they are stacked.

    Raises:
        ValueError: a file is missing or damaged, or the decoder does not support the model; the message names
            the file and the key or tensor.
    """
    config = config or read_config(folder)
    file = SafetensorsFolder(path_of(folder))
    return config, place(config, file, shardings=shardings, dtype=dtype, by_rows=by_rows, apart=apart)


def read_config(folder: str | os.PathLike[str]) -> DecoderConfig:
    """Reads config.json.

    Raises:
        ValueError: it is missing, is not JSON, lacks a key, or describes an unsupported model.
    """
    path = path_of(folder) / CONFIG
    return understand(read_json(path), path)


def save_model(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: nnx.State,
    *,
    adapters: nnx.State | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 2**30,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
    token_ids: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Writes a model folder that `load_model` and transformers read; returns the bytes of its tensors.

    Args:
        folder: created if necessary; a model in it is replaced. It may be in a bucket (`dapo_jax.storage`).
        config: sizes and switches.
        params: the decoder's parameters, on any devices; one tensor at a time is gathered on the host.
        adapters: are added to their matrices.
        dtype: stored type, float32, float16 or bfloat16.
        max_shard_bytes: largest size of a file.
        eos_ids: tokens that end a text, for config.json.
        bos_id: the token that begins a text, if there is one.
        pad_id: the token that fills unused positions.
        token_ids: further tokens by their names in config.json.
    """
    described = describe(config, dtype=dtype, eos_ids=eos_ids, bos_id=bos_id, pad_id=pad_id) | dict(token_ids)
    tensors = list(exported(config, params, adapters))
    return write_model(folder, described, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)


def write_model(
    folder: str | os.PathLike[str],
    described: dict[str, Any],
    tensors: Sequence[Tensor],
    *,
    dtype: str,
    max_shard_bytes: int = 5 * 2**30,
) -> int:
    """Writes tensors and then config.json with the content `described`; returns the bytes of the tensors.

    config.json is written last, so that an interrupted export is not taken for a model.
    """
    check_dtype(dtype)  # before files of an earlier model are removed
    path = path_of(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).unlink(missing_ok=True)
    written = write_tensors(path, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
    write_json(path / CONFIG, described)
    return written
