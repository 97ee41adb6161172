"""The compiled programs of a run, which the runs of one process share: where shapes and options are the same, the second one traces and compiles nothing.

A notebook that trains again with another learning rate, another seed or other data starts at once. Kept are the last few of each kind; what they
were made of is shapes and numbers, so they hold no weights; `jax.clear_caches()` gives back the memory that compiled programs take on a device.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Lowered

from dapo_jax.config import SamplingConfig, TrainConfig
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.models.decoder import graph_of, is_apart
from dapo_jax.models.layout import Layout
from dapo_jax.models.lora import parted
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.together import meet
from dapo_jax.parallel.weights import (
    AdapterTransfer,
    MergingTransfer,
    SamplerWeights,
    WeightTransfer,
    shares_base,
    weight_transfer,
)
from dapo_jax.run.policy import Policy
from dapo_jax.sampling.decoding import Decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.prompt_packing import PrefillShape
from dapo_jax.training.update import Objective, UpdateOptions, Updater

_KEPT = 4

_AT_ONCE = 8
"""Programs that are compiled at the same time: a large one takes gigabytes of the host's memory while it is compiled."""


@lru_cache(maxsize=_KEPT)
def engine_of(
    decoder: DecoderConfig,
    mesh: Mesh,
    *,
    slots: int,
    capacity: int,
    steps_per_call: int,
    stop_ids: tuple[int, ...],
    compute_dtype: str,
    page_tokens: int,
    cache_tokens: int,
    cache_dtype: str,
    cache_bytes: int | None,
    prefill: PrefillShape,
    in_flight: int = 0,
    batch_invariant: bool = False,
    has_turns: bool = False,
) -> DecoderEngine:
    """The sampler's engine: see `DecoderEngine`."""
    return DecoderEngine(
        decoder,
        slots=slots,
        capacity=capacity,
        steps_per_call=steps_per_call,
        stop_ids=stop_ids,
        mesh=mesh,
        compute_dtype=compute_dtype,
        page_tokens=page_tokens,
        cache_tokens=cache_tokens,
        cache_dtype=cache_dtype,
        cache_bytes=cache_bytes,
        in_flight=in_flight,
        prefill=prefill,
        batch_invariant=batch_invariant,
        has_turns=has_turns,
    )


@runtime_checkable
class Lowering(Protocol):
    """An engine whose programs can be lowered before they are called."""

    def programs(self, params: SamplerWeights, decoding: Decoding) -> dict[str, Callable[[], Lowered]]:
        """The programs of sampling by name, and what lowers each; see `DecoderEngine.programs`."""
        ...


def compile_sampling(engine: Lowering, weights: SamplerWeights, decodings: Iterable[Decoding]) -> None:
    """Compiles all programs with which `engine` samples, several at a time; `weights` and `decodings` may be shapes. What is left to compile
    while slots wait are tables of angles, and of several processes none reaches a collective long before the others."""
    for each in decodings:
        leaves, structure = jax.tree.flatten((weights, each))
        _compiled(engine, structure, tuple(leaves))
    meet()


@lru_cache(maxsize=2 * _KEPT)
def _compiled(engine: Lowering, structure: Any, leaves: tuple[Any, ...]) -> None:
    # What was compiled for another `decoding` is found again: only the program that draws depends on it.
    lowered = [lower() for lower in engine.programs(*jax.tree.unflatten(structure, leaves)).values()]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as threads:
        for _ in threads.map(Lowered.compile, lowered):
            pass  # or an error of the compiler would not be heard


Transfer = WeightTransfer | AdapterTransfer | MergingTransfer
"""A function of the parameters that are trained which gives sampler weights."""


def transfer_of(policy: Policy, meshes: Meshes, sampling: SamplingConfig, *, dtype: str) -> Transfer:
    """The way of weights from the trainer to the sampler: see `WeightTransfer`, and `AdapterTransfer` of a policy with adapters."""
    decoder, how = policy.decoder, {"dtype": dtype, "eight_bit": sampling.weight_dtype == "int8"}
    if decoder.lora is None:
        return _transfer(decoder, meshes, "all", **how)
    if sampling.merge_lora:
        return MergingTransfer(_transfer(decoder, meshes, "merged", **how), policy.frozen)
    adapters, base = (_transfer(decoder, meshes, part, **how) for part in ("adapters", "base"))
    return AdapterTransfer(adapters, base, policy.frozen)


@lru_cache(maxsize=2 * _KEPT)
def _transfer(
    decoder: DecoderConfig, meshes: Meshes, part: str, *, dtype: str, eight_bit: bool
) -> WeightTransfer:
    shapes = shapes_of(decoder)
    trained, frozen = parted(shapes)
    moved = {"adapters": trained, "base": frozen}.get(part, shapes)
    factor = decoder.lora.scale if part == "merged" and decoder.lora is not None else None
    return weight_transfer(moved, meshes, dtype=dtype, eight_bit=eight_bit, merged_by=factor)


def sharing(
    meshes: Meshes, sampling: SamplingConfig, *, dtype: str, remat: str = "none"
) -> Callable[[nnx.State], bool]:
    """Says of the shapes of a base below adapters whether a sampler that computes in `dtype` takes it as the trainer has it: see `shares_base`.

    One whose adapters are merged, or whose weights have eight bits, never does. Nor is a base shared on a CPU that is to compute activations again: of layers that are not in
    a loop XLA keeps them there all the same, which takes more memory than a second copy (SmolLM2-135M, 1,024 tokens: 2.3 GB for 0.7).
    """
    in_a_loop = remat != "none" and meshes.train.devices.flat[0].platform == "cpu"
    if sampling.merge_lora or sampling.weight_dtype or in_a_loop:
        return lambda frozen: False
    return partial(shares_base, meshes=meshes, dtype=dtype)


def sampled_decoder(decoder: DecoderConfig, sampling: SamplingConfig) -> DecoderConfig:
    """The decoder of a sampler: one whose adapters are merged has none."""
    return decoder.base if sampling.merge_lora else decoder


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
) -> Updater:
    """The update that `config` describes. One with an own objective, or with the parameters of a reference policy or below adapters, is not shared.

    Raises:
        ValueError: `loss.kl_coef` without a reference policy, or the other way round.
    """
    loss, model, correction = config.loss, config.model, config.correction
    options = UpdateOptions(
        temperature=config.sampling.temperature,
        old_logprobs=loss.old_logprobs,
        correction=correction.kind,
        importance_range=(correction.low, correction.high),
        kl_coef=loss.kl_coef,
        offload=config.optimizer.offload,
    )
    clips = (loss.clip_ratio_low, loss.clip_ratio_high, loss.dual_clip)
    made = (
        _shared_updater
        if objective is None and reference is None and not frozen
        else partial(_new_updater, objective=objective, reference=reference, frozen=frozen)
    )
    return made(
        decoder,
        optimizer,
        mesh,
        layout,
        compute_dtype=model.compute_dtype,
        remat=model.remat,
        clips=clips,
        options=options,
    )


def _new_updater(
    decoder: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    layout: Layout,
    *,
    compute_dtype: str,
    remat: str,
    clips: tuple[float, float, float | None],
    options: UpdateOptions,
    objective: Objective | None = None,
    reference: nnx.State | None = None,
    frozen: nnx.State | None = None,
) -> Updater:
    low, high, dual = clips
    clipped = partial(dapo_loss, clip_ratio_low=low, clip_ratio_high=high, dual_clip=dual)
    apart = bool(frozen) and is_apart(frozen)
    return Updater(
        graph_of(decoder, compute_dtype=compute_dtype, remat=remat, layout=layout, apart=apart),
        parted(shapes_of(decoder))[0],
        optimizer,
        mesh,
        objective=objective or clipped,
        options=options,
        reference=reference,
        frozen=frozen,
    )


_shared_updater = lru_cache(maxsize=_KEPT)(_new_updater)
