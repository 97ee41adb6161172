"""The training pass on a mesh (its attention, the tokens of a row, the rules of packing) and the batches of each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from dapo_jax.config import BatchConfig, ConfigError, ModelConfig, SftBatchConfig, TrainConfig
from dapo_jax.dapo.batching import example_weights, split_minibatches, training_examples
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group
from dapo_jax.models.kernels import SPLASH_TOKENS
from dapo_jax.models.layout import Layout
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.training.row_packing import pack

SHORTEST_ROW = 1024
"""Rows are halved down to this many tokens, at most four times. Each length is a program of its own, which pays off for long rows."""


@dataclass(frozen=True, kw_only=True)
class TrainingPass:
    """The shapes shared by the update and the packing of its rows."""

    layout: Layout
    row_tokens: int
    packing: dict[str, Any]
    """Arguments of `row_packing.pack`: the devices that rows are spread over, whether prompts may be shared, and the shorter row lengths."""


def training_pass(
    model: ModelConfig,
    batch: BatchConfig | SftBatchConfig,
    mesh: Mesh,
    *,
    row_tokens: int,
    platform: str | None = None,
) -> TrainingPass:
    """Returns the pass for `model` and `batch`.

    Args:
        row_tokens: the least number of tokens of a row. Without `batch.row_tokens` it is rounded up to a multiple that mesh and attention can split.
        platform: the platform of the mesh's devices; None: ask them.

    Raises:
        ConfigError: rows, mesh and attention do not fit together.
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
    """Returns the decoder with its vocabulary padded so that each of the meshes can split it."""
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


class StepBatches:
    """The batches of one run's steps."""

    def __init__(self, config: TrainConfig, training_pass: TrainingPass, *, pad_id: int) -> None:
        self._config, self._pass, self._pad_id = config, training_pass, pad_id

    def split(self, groups: Sequence[Group], step: int) -> list[list[Group]]:
        """Returns the groups of each update of a step."""
        config, filtered = self._config, self._config.reward.overlong.filter_truncated
        split = split_minibatches(
            groups, groups_per_update=config.batch.groups_per_update, seed=(config.seed, step)
        )
        # If overlong filtering left no token, or every episode was lost before its first turn, an update would only apply weight decay.
        return [
            minibatch
            for minibatch in split
            if any(
                rollout.response_tokens and not (filtered and rollout.truncated)
                for group in minibatch
                for rollout in group.rollouts
            )
        ]

    def minibatches(self, groups: Sequence[Group], step: int) -> list[list[Microbatch]]:
        """Returns the microbatches of each update of a step, on the host."""
        config, packed = self._config, []
        for minibatch in self.split(groups, step):
            examples = training_examples(
                minibatch,
                normalize_std=config.loss.normalize_std,
                filter_truncated=config.reward.overlong.filter_truncated,
                by_turn=config.environment.credit == "turn",
            )
            weights = example_weights(
                examples, aggregation=config.loss.aggregation, max_response_tokens=config.episode_tokens
            )
            rows = pack(
                examples,
                weights,
                row_tokens=self._pass.row_tokens,
                rows_per_microbatch=config.batch.rows_per_microbatch,
                pad_id=self._pad_id,
                **self._pass.packing,
            )
            packed.append(rows)
        return packed
