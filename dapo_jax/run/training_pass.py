"""How a training pass runs on a mesh: which attention, rows of how many tokens, and what may be packed into one."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from dapo_jax.config import BatchConfig, ConfigError, ModelConfig, SftBatchConfig
from dapo_jax.models.kernels import SPLASH_TOKENS
from dapo_jax.models.layout import Layout
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.training_layout import layout_of

SHORTEST_ROW = 1024
"""Rows are halved down to this many tokens, four times at most: a program each, which pays off where rows are long."""


@dataclass(frozen=True, kw_only=True)
class TrainingPass:
    """The shapes that the update and what fills its rows agree on."""

    layout: Layout
    row_tokens: int
    packing: dict[str, Any]
    """For `row_packing.pack`: over how many devices rows are spread, what the attention can tell apart, and how short rows may be."""


def training_pass(
    model: ModelConfig,
    batch: BatchConfig | SftBatchConfig,
    mesh: Mesh,
    *,
    row_tokens: int,
    platform: str | None = None,
) -> TrainingPass:
    """The pass that `model` and `batch` ask for; `row_tokens` is what a row needs at least, `platform` that of the mesh's devices.

    Where `batch.row_tokens` leaves it open, rows are filled up to what the mesh and the attention can cut.

    Raises:
        ConfigError: rows, mesh and attention do not go together.
    """
    platform = platform or mesh.devices.flat[0].platform
    attention = _attention(model, batch, platform, whole_rows=mesh.shape["context"] == 1)
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    if attention == "cudnn" and context > 1:
        raise ConfigError(
            f"model.attention=cudnn takes whole rows; found parallel.context={context}: set it to 1, or model.attention=xla"
        )
    multiple = context * tensor if attention != "splash" else context * SPLASH_TOKENS * tensor
    filled = -(-row_tokens // multiple) * multiple
    if batch.row_tokens and filled != row_tokens:
        kernel = f" x {SPLASH_TOKENS} (model.attention=splash)" if attention == "splash" else ""
        raise ConfigError(
            f"batch.row_tokens={row_tokens} must be a multiple of parallel.context x parallel.tensor{kernel} = {multiple}, "
            f"over which a row's tokens are split; {filled} is"
        )
    halves = (-(-filled // (parts * multiple)) * multiple for parts in (2, 4, 8, 16))
    return TrainingPass(
        layout=layout_of(mesh, attention=attention),
        row_tokens=filled,
        packing={
            "spread": math.prod(mesh.shape[axis] for axis in BATCH_AXES),
            "share_prompts": attention == "xla",
            "alone": not batch.packing,
            "shorter_rows": tuple(tokens for tokens in halves if SHORTEST_ROW <= tokens < filled),
        },
    )


def for_mesh(decoder: DecoderConfig, *meshes: Mesh) -> DecoderConfig:
    """The decoder with its vocabulary filled up so that each of the meshes can split it."""
    for mesh in meshes:
        tensor = mesh.shape["tensor"]
        if decoder.vocab_rows % tensor:
            decoder = replace(decoder, vocab_multiple=decoder.vocab_multiple * tensor)
    return decoder


def _attention(
    model: ModelConfig, batch: BatchConfig | SftBatchConfig, platform: str, *, whole_rows: bool
) -> str:
    if model.attention != "auto":
        needed = {"splash": "tpu", "cudnn": "gpu"}.get(model.attention, platform)
        if platform != needed:
            raise ConfigError(
                f"model.attention={model.attention} is a kernel for a {needed}; the devices are of kind {platform}: set "
                "model.attention=auto, or xla"
            )
        return model.attention
    if platform == "tpu":
        return "splash"
    able = not batch.packing and model.compute_dtype == "bfloat16" and whole_rows
    return "cudnn" if platform == "gpu" and able else "xla"
