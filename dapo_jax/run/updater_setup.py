"""Builds the objective and the updater from a configuration. Runs in the same process share updaters of the same shapes and options."""

import json
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import optax
from flax import nnx
from jax.sharding import Mesh

from dapo_jax.config import ConfigError, LossConfig, TrainConfig
from dapo_jax.config.algorithms import CLIPS
from dapo_jax.config.keys import named, prefixed
from dapo_jax.dapo.objectives import load_objective, options_of, wanted, with_shared_metrics
from dapo_jax.dapo.tokens import HEADS, Shapes, bytes_per_token, head_shapes
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.device_layout import Layout
from dapo_jax.models.lora import parted
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import shapes_of
from dapo_jax.rewards.functions import load_function
from dapo_jax.rewards.sample import name_of
from dapo_jax.run.learner import Learner
from dapo_jax.training.update import Model, Objective, UpdateOptions, Updater

_KEPT = 4


def objective_of(loss: LossConfig) -> Objective:
    """Returns the objective that a configuration names, with its options set, and with the clip ratios if the function has them. Raises ConfigError if the
    objective cannot be loaded, or it does not have an option."""
    clips = tuple(getattr(loss, name) for name in CLIPS)
    # Runs with the same built-in objective share their programs. A user's function may have changed since the last call, so it is loaded each time.
    name, options = named(loss.objective)
    build = _objective.__wrapped__ if ":" in name else _objective
    return build(name, json.dumps(options, sort_keys=True), clips)


@lru_cache(maxsize=_KEPT)
def _objective(spec: str, options: str, clips: tuple[float, float]) -> Objective:
    with prefixed(f"loss.objective={{{spec}: {options}}}"):
        objective = load_objective(load_function(spec) if ":" in spec else spec, json.loads(options))
    known = options_of(objective)
    clipped = {name: clip for name, clip in zip(CLIPS, clips, strict=True) if name in known}
    return partial(objective, **clipped)


def has_reference(config: TrainConfig, objective: Objective) -> bool:
    """Returns whether an update needs the log-probabilities of a reference policy, for the KL penalty or for the objective. Raises ConfigError if the objective
    requires an array that the configuration does not provide."""
    arrays = wanted(objective)
    unset = {"selected": "loss.select"} if config.loss.select == "all" else {}
    if not config.teacher.source or config.teacher.kl == "full":
        unset["teacher_logprobs"] = "teacher.source, with teacher.kl=sampled"
    for array in arrays & unset.keys():
        raise ConfigError(f"{name_of(objective)} requires the array {array}: set {unset[array]}")
    for array in arrays & {"segment_ids", "ref_logprobs", "teacher_logprobs"} if config.loss.center else ():
        raise ConfigError(
            f"loss.center={config.loss.center} needs an objective of single tokens, but {name_of(objective)} requires the array {array}, which compares the tokens of a response or is "
            "known for the sampled token only: set loss.center=0"
        )
    return bool(config.loss.kl_coef) or "ref_logprobs" in arrays


def recorded_values(config: TrainConfig, decoder: DecoderConfig) -> Shapes:
    """Returns the optional values that a run records for each token: with routing replay, the experts that the sampler chose, and with score centering its most
    probable tokens."""
    heads = head_shapes(config.loss.center)
    if config.rollout.routing_replay == "off" or decoder.routes is None:
        return heads
    return (("routes", *decoder.routes), *heads)


def record_notes(config: TrainConfig, recorded: Shapes) -> Iterator[str]:
    """Yields a message about the size of each kind of record."""
    batch, longest = config.batch, config.data.max_prompt_tokens + config.episode_tokens
    tokens = batch.prompts_per_step * batch.group_size * longest
    for what, off, names in (
        ("routing replay", "rollout.routing_replay=off", ("routes",)),
        ("score centering", "loss.center=0", HEADS),
    ):
        if each := bytes_per_token([shape for shape in recorded if shape[0] in names]) - bytes_per_token():
            yield (
                f"{what} records {each} bytes per token: the groups of a step take up to {tokens * each / 2**30:.2f} GiB of host memory in each process, and as much is sent to "
                f"the other processes (to train without records, set {off})"
            )


def updater_of(
    config: TrainConfig,
    learner: Learner,
    *,
    objective: Objective | None = None,
    reference: nnx.State | None = None,
    teacher: Model | None = None,
) -> Updater:
    """Returns the updater of a training run. Runs share it, unless they have a custom objective, a reference policy, a LoRA base or a teacher.

    Raises:
        ConfigError: the objective in the configuration is invalid.
        ValueError: there is a reference policy although `has_reference` returns False, or the other way round.
    """
    loss, decoder, correction = config.loss, learner.policy.decoder, config.correction
    select, select_options = named(loss.select)
    options = UpdateOptions(
        temperature=config.sampling.temperature,
        old_logprobs=loss.old_logprobs,
        correction=correction.kind,
        importance_range=(correction.low, correction.high),
        drop_off_policy=loss.drop_off_policy,
        select=select,
        select_options=tuple(select_options.items()),
        kl_coef=loss.kl_coef,
        kl_estimator=loss.kl_estimator,
        teacher_coef=config.teacher.coef,
        teacher_kl=config.teacher.kl,
        self_teacher=config.teacher.is_self,
        offload=config.optimizer.offload,
        recorded=recorded_values(config, decoder),
    )
    weights = {"reference": reference, "frozen": learner.policy.frozen, "teacher": teacher}
    is_shared = objective is None and ":" not in named(loss.objective).name and not any(weights.values())
    build = _shared_updater if is_shared else partial(_new_updater, **weights)
    arguments = (decoder, learner.optimizer, learner.meshes.train, options, objective or objective_of(loss))
    model, layout = config.model, learner.training_pass.layout
    return build(*arguments, compute_dtype=model.compute_dtype, remat=model.remat, layout=layout)


def _new_updater(
    decoder: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    options: UpdateOptions,
    objective: Objective,
    *,
    compute_dtype: str,
    remat: str,
    layout: Layout,
    **weights: Any,
) -> Updater:
    graph = graph_of(decoder, compute_dtype=compute_dtype, remat=remat, layout=layout)
    params, objective = parted(shapes_of(decoder))[0], with_shared_metrics(objective)
    return Updater(graph, params, optimizer, mesh, objective=objective, options=options, **weights)


_shared_updater = lru_cache(maxsize=_KEPT)(_new_updater)
