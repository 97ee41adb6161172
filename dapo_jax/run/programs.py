"""The compiled programs of a run. Runs in the same process share them, so a second run with the same shapes and options compiles nothing.

For example, a notebook that trains again with another learning rate, seed or dataset starts immediately. Cached programs contain no weights.
"""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered

from dapo_jax.config import ConfigError, LossConfig, SamplingConfig, TrainConfig
from dapo_jax.config.algorithms import CLIPS
from dapo_jax.config.keys import prefixed
from dapo_jax.dapo.objectives import load_objective, options_of, wanted, with_shared_metrics
from dapo_jax.dapo.rollouts import NO_ROUTE
from dapo_jax.models.decoder import graph_of, is_apart
from dapo_jax.models.layout import Layout
from dapo_jax.models.lora import parted
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.together import meet
from dapo_jax.parallel.weights import (
    AdapterTransfer,
    SamplerWeights,
    WeightTransfer,
    shares_base,
)
from dapo_jax.rewards.functions import load_function
from dapo_jax.rewards.sample import name_of
from dapo_jax.run.policy import Policy, load_policy, teacher_of
from dapo_jax.run.resume_point import model_files
from dapo_jax.run.training_pass import training_pass
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.training.update import Model, Objective, UpdateOptions, Updater

_KEPT = 4

_AT_ONCE = 8
"""Maximum number of programs compiled at the same time. Compiling a large program takes gigabytes of host memory."""


engine_of = lru_cache(maxsize=_KEPT)(DecoderEngine)
"""Returns the sampler's engine (see `DecoderEngine`). Calls with the same arguments return the same engine."""


@runtime_checkable
class Lowering(Protocol):
    """A sampling engine whose programs can be compiled before the first call."""

    def programs(self, params: SamplerWeights, decoding: Decoding) -> dict[str, Callable[[], Lowered]]:
        """Returns a dict from the name of each sampling program to a function that lowers it. See `DecoderEngine.programs`."""
        ...


def compile_sampling(engine: Lowering, weights: SamplerWeights, decodings: Iterable[Decoding]) -> None:
    """Compiles all sampling programs of `engine` in parallel, then waits for all other processes. `weights` and `decodings` may be shapes.

    Without this wait, a process could time out in a collective while another process is still compiling.
    """
    for each in decodings:
        leaves, structure = jax.tree.flatten((weights, each))
        _compiled(engine, structure, tuple(leaves))
    meet()


@lru_cache(maxsize=2 * _KEPT)
def _compiled(engine: Lowering, structure: Any, leaves: tuple[Any, ...]) -> None:
    # Only one program depends on `decoding`. From the second `decoding` on, the other programs are in the cache.
    lowered = [lower() for lower in engine.programs(*jax.tree.unflatten(structure, leaves)).values()]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as threads:
        for _ in threads.map(Lowered.compile, lowered):
            pass  # the iteration raises errors from the threads


Transfer = WeightTransfer | AdapterTransfer
"""A function from trained parameters to sampler weights."""


def transfer_of(policy: Policy, meshes: Meshes, sampling: SamplingConfig, *, dtype: str) -> Transfer:
    """Returns the transfer of weights from trainer to sampler: an `AdapterTransfer` if adapters stay separate, otherwise a `WeightTransfer`."""
    decoder, how = policy.decoder, {"dtype": dtype, "eight_bit": sampling.weight_dtype == "int8"}
    if decoder.lora is None:
        return _transfer(decoder, meshes, "all", **how)
    if sampling.merge_lora:
        return _transfer(decoder, meshes, "merged", **how).with_base(policy.frozen)
    # Arrays that are shared with the trainer have its form.
    base = _transfer(decoder, meshes, "base", join=False if is_apart(policy.frozen) else None, **how)
    return AdapterTransfer(_transfer(decoder, meshes, "adapters", **how), base, policy.frozen)


@lru_cache(maxsize=2 * _KEPT)
def _transfer(
    decoder: DecoderConfig,
    meshes: Meshes,
    part: str,
    *,
    dtype: str,
    eight_bit: bool,
    join: bool | None = None,
) -> WeightTransfer:
    shapes = shapes_of(decoder)
    trained, frozen = parted(shapes)
    moved = {"adapters": trained, "base": frozen}.get(part, shapes)
    factor = decoder.lora.scale if part == "merged" and decoder.lora is not None else None
    how: dict[str, Any] = {"dtype": dtype, "eight_bit": eight_bit, "merged_by": factor, "join": join}
    return WeightTransfer(moved, meshes, **how, places=decoder.places)


def sharing(meshes: Meshes, sampling: SamplingConfig, *, dtype: str) -> Callable[[nnx.State], bool]:
    """Returns a function that takes the shapes of a LoRA base, and returns whether a sampler with this `dtype` shares the trainer's arrays (see `shares_base`).

    Arrays are not shared if adapters are merged, or if the sampler's weights are int8.
    """
    if sampling.merge_lora or sampling.weight_dtype:
        return lambda frozen: False
    return partial(shares_base, meshes=meshes, dtype=dtype)


def sampled_decoder(decoder: DecoderConfig, sampling: SamplingConfig) -> DecoderConfig:
    """Returns the sampler's decoder. It has no adapters if they are merged into the weights."""
    return decoder.base if sampling.merge_lora else decoder


def objective_of(loss: LossConfig) -> Objective:
    """Returns the objective that a configuration names, with `loss.options` set, and with the clip ratios and the dual clip if the function has them.

    Raises:
        ConfigError: the objective cannot be loaded, or it does not have an option.
    """
    clips = tuple(getattr(loss, name) for name in CLIPS)
    # Runs with the same built-in objective share their programs. A user's function may have changed since the last call, so it is loaded each time.
    build = _objective.__wrapped__ if ":" in loss.objective else _objective
    return build(loss.objective, json.dumps(loss.options, sort_keys=True), clips)


@lru_cache(maxsize=_KEPT)
def _objective(spec: str, options: str, clips: tuple[float, float, float | None]) -> Objective:
    with prefixed(f"loss.objective={spec}, loss.options={options}"):
        found = load_objective(load_function(spec) if ":" in spec else spec, json.loads(options))
    known = options_of(found)
    clipped = {name: clip for name, clip in zip(CLIPS, clips, strict=True) if name in known}
    return partial(found, **clipped)


def has_reference(config: TrainConfig, objective: Objective) -> bool:
    """Returns whether an update needs the log-probabilities of a reference policy, for the KL penalty or for the objective.

    Raises:
        ConfigError: the objective requires an array that the configuration does not provide.
    """
    arrays = wanted(objective)
    unset = {"selected": "loss.select"} if config.loss.select == "all" else {}
    if not config.teacher.source or config.teacher.kl == "full":
        unset["teacher_logprobs"] = "teacher.source, with teacher.kl=sampled"
    for array in arrays & unset.keys():
        raise ConfigError(f"{name_of(objective)} requires the array {array}: set {unset[array]}")
    return bool(config.loss.kl_coef) or "ref_logprobs" in arrays


def recorded_routes(config: TrainConfig, decoder: DecoderConfig) -> tuple[int, int] | None:
    """Returns the number of layers and of experts per token that a run records, or None if it does not record the sampler's choice of experts.

    Raises:
        ConfigError: a record cannot have the numbers of all experts.
    """
    if config.rollout.routing_replay == "off" or decoder.experts is None:
        return None
    if decoder.experts.count > NO_ROUTE:
        raise ConfigError(
            f"rollout.routing_replay=sampler records experts in one byte and so needs at most {NO_ROUTE} experts, but model.source={config.model.source!r} has "
            f"{decoder.experts.count}: set rollout.routing_replay=off"
        )
    return decoder.layers, decoder.experts.chosen


def routes_note(config: TrainConfig, token_bytes: int) -> str:
    """Returns a message about the size of the records of experts. `token_bytes` is the size of one token's record."""
    batch, longest = config.batch, config.data.max_prompt_tokens + config.episode_tokens
    most = batch.prompts_per_step * batch.group_size * longest * token_bytes
    return (
        f"routing replay records {token_bytes} bytes per token: the groups of a step take up to {most / 2**30:.2f} GiB of host memory in each process, and as much is sent to "
        "the other processes (to train without records, set rollout.routing_replay=off)"
    )


def updater_of(
    config: TrainConfig,
    decoder: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    layout: Layout,
    objective: Objective | None = None,
    reference: nnx.State | None = None,
    frozen: nnx.State | None = None,
    teacher: Model | None = None,
) -> Updater:
    """Returns the updater that `config` describes. Runs share it, unless they have a custom objective, a reference policy, a LoRA base or a teacher.

    Raises:
        ConfigError: the objective in the configuration is invalid.
        ValueError: there is a reference policy although `has_reference` returns False, or the other way round.
    """
    loss, model, correction = config.loss, config.model, config.correction
    options = UpdateOptions(
        temperature=config.sampling.temperature,
        old_logprobs=loss.old_logprobs,
        correction=correction.kind,
        importance_range=(correction.low, correction.high),
        drop_off_policy=loss.drop_off_policy,
        select=loss.select,
        select_options=tuple(loss.select_options.items()),
        kl_coef=loss.kl_coef,
        kl_estimator=loss.kl_estimator,
        teacher_coef=config.teacher.coef,
        teacher_kl=config.teacher.kl,
        offload=config.optimizer.offload,
        routes=recorded_routes(config, decoder),
    )
    function, own = objective or objective_of(loss), (reference, frozen, teacher)
    arguments = (decoder, optimizer, mesh, layout, model.compute_dtype, model.remat, options, function)
    if objective or ":" in loss.objective or any(own):
        return _new_updater(*arguments, *own)
    return _shared_updater(*arguments)


def load_teacher(config: TrainConfig, student: Policy, mesh: Mesh) -> Policy:
    """Loads the teacher of a run, sharded over `mesh`.

    Raises:
        ConfigError: the teacher cannot be loaded, its tokenizer is not the tokenizer of the student, or it has fewer vocabulary entries.
    """
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    teacher = load_policy(teacher_of(config), seed=config.seed, mesh=mesh, section="teacher", longest=longest)
    one, other = (model_files(a.folder, weights=False).get("tokenizer.json") for a in (student, teacher))
    if student.tokenizer != teacher.tokenizer:
        raise ConfigError(
            f"teacher.source={config.teacher.source!r} has another tokenizer than model.source={config.model.source!r}: sha256 of tokenizer.json "
            f"{other or '(no file)'} and {one or '(no file)'}. Token ids must have the same meaning in both: use a teacher of the same model family"
        )
    least, found = student.decoder.vocab_size, teacher.decoder.vocab_size
    if found < least:
        raise ConfigError(
            f"teacher.source={config.teacher.source!r} has {found} vocabulary entries, but the student may sample any of the {least} entries of "
            f"model.source={config.model.source!r}: use a teacher with at least {least} entries"
        )
    return teacher


def taught_by(config: TrainConfig, teacher: Policy, mesh: Mesh) -> Model:
    """Returns the decoder of a teacher for updates on `mesh`, and its parameters."""
    model = config.model
    how = training_pass(model, config.batch, mesh, teacher.decoder, row_tokens=config.row_tokens)
    graph = teacher.graph(compute_dtype=model.compute_dtype, remat="none", layout=how.layout)
    return graph, teacher.params, teacher.frozen


def _new_updater(
    decoder: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    layout: Layout,
    compute_dtype: str,
    remat: str,
    options: UpdateOptions,
    objective: Objective,
    reference: nnx.State | None = None,
    frozen: nnx.State | None = None,
    teacher: Model | None = None,
) -> Updater:
    return Updater(
        graph_of(decoder, compute_dtype=compute_dtype, remat=remat, layout=layout),
        parted(shapes_of(decoder))[0],
        optimizer,
        mesh,
        objective=with_shared_metrics(objective),
        options=options,
        reference=reference,
        frozen=frozen,
        teacher=teacher,
    )


_shared_updater = lru_cache(maxsize=_KEPT)(_new_updater)
