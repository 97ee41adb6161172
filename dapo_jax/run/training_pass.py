"""The training pass on a mesh (attention and row lengths), and the batches of each step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from dapo_jax.config import BatchConfig, ConfigError, ModelConfig, SftBatchConfig, TrainConfig
from dapo_jax.config.keys import named
from dapo_jax.dapo.advantages import Advantages
from dapo_jax.dapo.batching import (
    Example,
    example_weights,
    split_minibatches,
    training_examples,
    turn_advantages,
)
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.rollouts import Group, Prompt
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.device_layout import Layout
from dapo_jax.models.kernels import SPLASH_TOKENS
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import AnyDevice, batch_shards
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.training.row_packing import pack

ResponseAdvantages = Mapping[tuple[int, int], float]
"""Maps (ordinal, response index) of each response that a step trains on to its advantage. With `environment.credit=turn`, this is the episode's advantage."""

SHORTEST_ROW = 1024
"""Rows of 1/2 to 1/16 of the full length are used only if they have at least this many tokens, because each length requires its own compiled program."""


_CAPPED = "capped attention scores (attn_logit_softcapping)"


@dataclass(frozen=True, kw_only=True)
class TrainingPass:
    """The layout and row lengths that row packing and the update must agree on."""

    layout: Layout
    row_tokens: int
    packing: dict[str, Any]
    """Keyword arguments for `row_packing.pack`: the number of device groups, whether prompts may be shared, and the shorter row lengths."""
    note: str = ""
    """The reason why attention uses XLA operations instead of the platform's kernel, or an empty string."""


def training_pass(
    model: ModelConfig,
    batch: BatchConfig | SftBatchConfig,
    mesh: Mesh,
    decoder: DecoderConfig,
    *,
    row_tokens: int,
    device: AnyDevice | None = None,
) -> TrainingPass:
    """Returns the training pass of the trained model or of the teacher. `device` is the device whose attention kernel is used. It defaults to the first of the mesh.
    `row_tokens` is rounded up to a multiple that mesh and attention can split, unless `batch.row_tokens` is set. Raises ConfigError if row length, mesh and
    attention do not fit together."""
    context, tensor = mesh.shape["context"], mesh.shape["tensor"]
    if decoder.fixed and context > 1:
        raise ConfigError(
            f"parallel.context={context} splits rows over devices, but this model has layers in which each part of a row needs the state after the parts before it: "
            "set parallel.context=1, and use parallel.fsdp or parallel.tensor"
        )
    device = device or mesh.devices.flat[0]
    attention, note = _attention(model, device, decoder, context), ""
    if decoder.score_cap is not None and device.platform == "gpu":
        note = f"training on {device.device_kind} uses XLA operations for attention, because cuDNN does not support {_CAPPED}"
    multiple = context * tensor if attention != "splash" else context * SPLASH_TOKENS * tensor
    filled = -(-row_tokens // multiple) * multiple
    if batch.row_tokens and filled != row_tokens:
        kernel = f" x {SPLASH_TOKENS} (model.attention=splash)" if attention == "splash" else ""
        raise ConfigError(
            f"batch.row_tokens={row_tokens} must be a multiple of parallel.context x parallel.tensor{kernel} = {multiple}, "
            f"because the tokens of a row are split over these axes; for example {filled}"
        )
    halves = (-(-filled // (parts * multiple)) * multiple for parts in (2, 4, 8, 16))
    return TrainingPass(
        layout=layout_of(mesh, attention=attention),
        row_tokens=filled,
        packing={
            "spread": batch_shards(mesh.shape),
            "share_prompts": attention != "splash",
            "shorter_rows": tuple(tokens for tokens in halves if SHORTEST_ROW <= tokens < filled),
        },
        note=note,
    )


def for_mesh(decoder: DecoderConfig, *meshes: Mesh | AbstractMesh) -> DecoderConfig:
    """Pads the decoder's vocabulary, so that it can be split over each of the meshes."""
    for mesh in meshes:
        tensor = mesh.shape["tensor"]
        if decoder.vocab_rows % tensor:
            decoder = replace(decoder, vocab_multiple=decoder.vocab_multiple * tensor)
    return decoder


def _attention(model: ModelConfig, device: AnyDevice, decoder: DecoderConfig, context: int) -> str:
    platform, cap = device.platform, decoder.score_cap
    head_dim = max(kind.mixer.row_dim(decoder) for kind in decoder.kinds if kind.mixer)
    width = head_dim % 8 == 0 and head_dim <= 256
    if model.attention != "auto":
        needed = {"splash": "tpu", "cudnn": "gpu"}.get(model.attention, platform)
        if platform != needed:
            raise ConfigError(
                f"model.attention={model.attention} is a kernel for platform {needed}, but the devices are {platform}: set "
                "model.attention=auto or model.attention=xla"
            )
        if model.attention == "cudnn" and cap is not None:
            raise ConfigError(
                f"model.attention=cudnn does not support {_CAPPED}, and the model caps them at {cap:g}: set model.attention=auto or model.attention=xla"
            )
        if model.attention == "cudnn" and (context > 1 or not width):
            raise ConfigError(
                f"model.attention=cudnn needs parallel.context=1 and a head_dim that is a multiple of 8, at most 256; found "
                f"parallel.context={context} and head_dim={head_dim}: set model.attention=xla"
            )
        return model.attention
    if platform == "tpu":
        return "splash"
    # The compute capability of an AMD GPU is a name, not a number.
    capability = getattr(device, "compute_capability", "")
    hopper = capability[:1].isdigit() and float(capability) >= 9.0
    able = model.compute_dtype == "bfloat16" and context == 1 and width and cap is None
    return "cudnn" if platform == "gpu" and hopper and able else "xla"


class StepBatches:
    """Builds the batches of each step of a run."""

    def __init__(
        self, config: TrainConfig, training_pass: TrainingPass, *, pad_id: int, advantages: Advantages,
        teacher_prompt: Callable[[Prompt], Tokens] | None = None,
    ) -> None:  # fmt: skip
        """`teacher_prompt` returns the prompt of the policy as its own teacher (`teacher.prompt`)."""
        self._config, self._compute, self._teacher_prompt = config, advantages, teacher_prompt
        options = {"row_tokens": training_pass.row_tokens, "pad_id": pad_id, **training_pass.packing}
        self._pack = partial(pack, rows_per_microbatch=config.batch.rows_per_microbatch, **options)
        self.advantages: ResponseAdvantages = {}
        """The advantages of the last step."""

    def split(self, groups: Sequence[Group], step: int) -> list[list[Group]]:
        """Shuffles the groups of a step and splits them into one list for each update."""
        config, filtered = self._config, self._config.reward.overlong.filter_truncated

        def has_loss(group: Group) -> bool:
            return any(r.response_tokens and not (filtered and r.truncated) for r in group.rollouts)

        size = config.batch.groups_per_update
        split = split_minibatches(groups, groups_per_update=size, seed=(config.seed, step))
        # Minibatches without tokens in the loss are dropped, because their updates would only apply weight decay. Such minibatches occur if
        # overlong filtering removes all their responses, or if every episode in them was lost before its first turn.
        return [minibatch for minibatch in split if any(map(has_loss, minibatch))]

    def minibatches(
        self,
        groups: Sequence[Group],
        step: int,
        score: Callable[[list[Microbatch]], np.ndarray] | None = None,
    ) -> list[list[Microbatch]]:
        """Computes the advantages of a step, and splits its groups into updates. Returns the packed microbatches of each update as host arrays. Raises
        ValueError if the function `advantages` did not return one number per rollout.

        `score` returns the log-probabilities of tokens under the policy (see `Updater.logprobs`). It is only called, and then required, if the policy is its own teacher.
        """
        config, packed = self._config, []
        by, filtered = config.loss.aggregation, config.reward.overlong.filter_truncated
        computed = [np.asarray(values, np.float64) for values in self._compute(groups)]
        if not config.learnt_metric:
            computed = [np.zeros_like(values) for values in computed]
        shapes, needed = [values.shape for values in computed], [(len(group.rollouts),) for group in groups]
        if shapes != needed:
            raise ValueError(f"advantages have the shapes {shapes}, need one number per rollout: {needed}")
        self.advantages = {
            (group.prompt.ordinal, index): value
            for group, values in zip(groups, computed, strict=True)
            for (index, _), value in zip(group.indexed, values.tolist(), strict=True)
        }
        for minibatch in self.split(groups, step):
            advantages: list[list[Any]] = [
                [self.advantages[group.prompt.ordinal, index] for index, _ in group.indexed]
                for group in minibatch
            ]
            if config.environment.credit == "turn":
                for group, values in zip(minibatch, advantages, strict=True):
                    by_turn = turn_advantages(group, normalize_std=config.advantage.scale == "group_std")
                    for index, by_token in by_turn.items():
                        values[index] = by_token
            examples = training_examples(minibatch, advantages, filter_truncated=filtered)
            if named(config.loss.select).name == "low_covariance":
                random = [np.random.default_rng((config.seed, step, g.prompt.ordinal)) for g in minibatch]
                examples = [
                    replace(e, noise=random[e.group].random(len(e.response), np.float32)) for e in examples
                ]
            if self._teacher_prompt is not None:
                assert score is not None
                prompts = [self._teacher_prompt(group.prompt) for group in minibatch]
                examples = self._taught(examples, prompts, score)
            weights = example_weights(examples, aggregation=by, max_response_tokens=config.episode_tokens)
            packed.append(self._pack(examples, weights))
        return packed

    def _taught(
        self, examples: Sequence[Example], prompts: Sequence[Tokens], score: Callable[[list[Microbatch]], np.ndarray]
    ) -> list[Example]:  # fmt: skip
        """Returns the examples with the log-probability of each token after the prompt of its group in `prompts`."""
        # The packed advantage of a token is the number of its example, to find the token again in the packed rows.
        asked = [
            Example(prompt=prompts[each.group], response=Tokens(each.response.ids), advantage=float(number))
            for number, each in enumerate(examples)
        ]
        packed = self._pack(asked, np.zeros(len(asked)), shorter_rows=())
        rows = jax.tree.map(lambda *arrays: np.stack(arrays), *packed)
        order = np.lexsort((rows.positions[rows.mask], rows.advantages[rows.mask]))
        ends = np.cumsum([len(each.response) for each in examples])
        values = np.split(score(packed)[rows.mask][order], ends[:-1])
        return [replace(each, teacher_logprobs=own) for each, own in zip(examples, values, strict=True)]
