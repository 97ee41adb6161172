"""Builds the sampler from a configuration: its engine, the shape of its prefill, and the size of its KV cache."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import Mesh

from dapo_jax.config import EvaluateConfig, SamplingConfig, TrainConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.device_memory import bytes_on_device, least_device_bytes
from dapo_jax.parallel.mesh import Meshes, batch_shards
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.policy import Policy
from dapo_jax.run.sampler_programs import compile_sampling, engine_of, transfer_of
from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.caches import token_bytes
from dapo_jax.sampling.engine import FEED_TOKENS
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.prompt_packing import PrefillShape, prefill_shape
from dapo_jax.text.stop_strings import StopStrings, stop_ids

_TURNS_AT_ONCE = 16
"""Minimum number of contexts to prefill together if episodes have several turns, because their contexts are many and short."""

KNOWN_SHARE = 0.9
"""Fraction of a device's memory for arrays of known size, like vLLM's `gpu_memory_utilization`. The rest is for temporary arrays and fragmentation."""

_LOGITS = 4
"""Number of copies of a slot's logits: one in the decode state, and the others are temporary while a token is sampled."""


class SamplerSpec(NamedTuple):
    """The specification of a sampler and its engine."""

    sampling: SamplingConfig
    """The `sampling` section of the configuration."""
    prompts_at_once: int
    """Number of prompts to sample together so that their groups fill the slots."""
    engine: EngineSpec
    """The specification of the engine without `stop_ids` and `cache_bytes`, which depend on the tokenizer and the memory of a device."""


def sampler_spec(
    sampling: SamplingConfig, *, max_prompt_tokens: int, group_size: int, **options: Any
) -> SamplerSpec:
    """Returns the specification of a sampler for `group_size` responses to each prompt. `options` are fields of `EngineSpec`."""
    capacity, prompts = max_prompt_tokens + sampling.max_response_tokens, max(1, sampling.slots // group_size)
    # With responses in flight or episodes, a context may contain a prompt and its whole response.
    has_turns = options.get("has_turns", False)
    prefill = prefill_shape(
        longest=capacity if has_turns or options.get("in_flight") else max_prompt_tokens,
        capacity=capacity,
        prompts=max(prompts, _TURNS_AT_ONCE) if has_turns else prompts,
        tokens=sampling.prefill_tokens,
        alone=sampling.batch_invariant,
    )
    same = ("slots", "steps_per_call", "cache_tokens", "cache_dtype", "batch_invariant")
    sizes = {name: getattr(sampling, name) for name in same}
    engine = EngineSpec(capacity=capacity, stop_ids=(), prefill=prefill, **sizes, **options)
    return SamplerSpec(sampling, prompts, engine)


def rollout_spec(config: TrainConfig, *, samplers: int, records_routes: bool = False) -> SamplerSpec:
    """Returns the specification of each of the `samplers` samplers of a training run."""
    return sampler_spec(
        config.sampling,
        max_prompt_tokens=config.data.max_prompt_tokens,
        group_size=config.batch.group_size,
        compute_dtype=config.model.compute_dtype,
        in_flight=-(-config.rollout.in_flight // samplers),
        has_turns=bool(config.environment.source),
        records_routes=records_routes,
        heads=config.loss.center,
    )


def evaluation_spec(config: EvaluateConfig) -> SamplerSpec:
    """Returns the specification of the sampler of an evaluation."""
    return sampler_spec(
        config.sampling,
        max_prompt_tokens=config.data.max_prompt_tokens,
        group_size=config.eval.samples_per_prompt,
        compute_dtype=config.compute_dtype,
        has_turns=bool(config.environment.source),
    )


def response_sampler(
    policy: Policy,
    meshes: Meshes,
    spec: SamplerSpec,
    *,
    seed: int,
    resident: int = 0,
    memory: int | None = None,
    on_look: Callable[[], None] = lambda: None,
) -> ResponseSampler:
    """Builds a sampler. Nothing is compiled yet. Raises ConfigError if the number of slots or the lengths do not fit the mesh, the model or the memory.

    `resident` is the memory in use on each device during sampling, in bytes, without the sampler's weights and cache. `memory` is the memory of a device in bytes. It
    defaults to the amount that the devices report; CPUs do not report an amount. `on_look` is called before each engine call that samples tokens.
    """
    sampling, mesh = spec.sampling, meshes.sampler
    transfer = transfer_of(policy, meshes, sampling, dtype=spec.engine.compute_dtype)
    memory = memory or least_device_bytes(mesh)
    resident += bytes_on_device(transfer.shapes, mesh.shape)
    room = room_for_cache(policy.decoder, mesh, spec.engine, resident=resident, memory=memory)
    with prefixed(""):
        ends = tuple(stop_ids(policy.tokenizer, sampling.stop_token_ids))
        engine = engine_of(policy.decoder, mesh, replace(spec.engine, stop_ids=ends, cache_bytes=room))
    known = room is not None and memory is not None
    return ResponseSampler(
        engine,
        transfer,
        seed=seed,
        max_response_tokens=sampling.max_response_tokens,
        prompts_at_once=spec.prompts_at_once,
        stop=StopStrings(policy.tokenizer, sampling.stop).find if sampling.stop else None,
        compile_for=partial(compile_sampling, engine, transfer.shapes),
        notes=[cache_note(engine.page_sizes, room=room, memory=memory)] if known else [],
        on_look=on_look,
    )


def room_for_cache(
    decoder: DecoderConfig, mesh: Mesh, spec: EngineSpec, *, resident: int, memory: int | None
) -> int | None:
    """Returns the number of bytes per device that the KV cache may use. It is 0 or negative if no memory is left.

    Returns None if the size of the cache does not depend on memory, because `sampling.cache_tokens` is set, the cache has no pages, or the device
    does not report its memory.

    `resident` and `memory` are as in `response_sampler`, except that `resident` includes the sampler's weights.
    """
    kind = spec.cache_kind(mesh, decoder)
    if memory is None or spec.cache_tokens or kind == "slots":
        return None
    spread, shape = batch_shards(mesh.shape), spec.prefill_shape
    by_table = token_bytes(decoder, mesh, dtype=spec.stored_dtype, kind=kind)
    each = sum(by_table.values())
    computed = sum(token_bytes(decoder, mesh, dtype=spec.compute_dtype, kind=kind).values())
    room = int(KNOWN_SHARE * memory) - resident - logits_bytes(decoder, spec.slots // spread)
    state = -(-decoder.state_bytes // mesh.shape["tensor"])
    room -= spec.slots // spread * state
    # There is room for the logits and the state of each paused response, and for the state of each episode between two turns.
    waiting = spec.in_flight if spec.in_flight > spec.slots else 0
    room -= waiting * decoder.vocab_rows * 4
    room -= -(-max(waiting, 2 * spec.slots * spec.parks) // spread) * state
    # Up to two prefills are in memory, because responses of one prefill may still wait for slots when the next prefill begins.
    rows = 2 * prefix_bytes(decoder, shape, token_bytes=each, state_bytes=state)
    # During chunked prefill, keys and values of the context are stored both in the compute dtype and in the dtype of the cache.
    width = -(-spec.capacity // shape.width) * shape.width
    parts = width * (computed + each) + shape.row_prompts * decoder.vocab_rows * 4 + state
    call_tokens = spec.steps_per_call + FEED_TOKENS * spec.has_turns
    sizes = spec.page_sizes(decoder, mesh, holders=spec.slots, call_tokens=call_tokens)
    all_slots = spec.slots // spread * sizes.response_cache_bytes(spec.capacity, by_table)
    if not spec.in_flight and shape.longest <= shape.width and room - rows >= all_slots:
        return room - rows  # all slots fit, so no response is re-prefilled and chunked prefill is not used
    return room - max(rows, rows // 2 + parts)


def logits_bytes(decoder: DecoderConfig, slots: int) -> int:
    """Returns the size of the logits of all slots in bytes, including the temporary copies while a token is sampled."""
    return _LOGITS * slots * decoder.vocab_rows * 4


def prefix_bytes(decoder: DecoderConfig, shape: PrefillShape, *, token_bytes: int, state_bytes: int) -> int:
    """Returns the size of the results of one prefill in bytes: the keys and values of all its rows, and the logits and states of fixed size after each prompt.
    `state_bytes` is the size of one sequence's state on a device."""
    return shape.rows * (
        shape.width * token_bytes + shape.row_prompts * (decoder.vocab_rows * 4 + state_bytes)
    )


def cache_note(sizes: PageSizes, *, room: int, memory: int) -> str:
    """Returns a message about the size of the KV cache. `room` is the number of bytes per device for the cache, and `memory` a device's memory."""
    tokens, most = (
        sizes.pools * pages * sizes.page_tokens
        for pages in (sizes.pool_pages, sizes.holders // sizes.pools * sizes.holder_pages())
    )
    if tokens == most:
        holds = f"all {sizes.holders} responses of up to {sizes.capacity:,} tokens"
    else:
        holds = f"{tokens:,} tokens, but all {sizes.holders} responses may need {most:,}: responses wait or are preempted when the cache is full"
    return (
        f"the KV cache has room for {holds}; {room / 2**30:.2f} of a device's {memory / 2**30:.2f} GiB were available for it "
        "(to change its size, set sampling.cache_tokens)"
    )
