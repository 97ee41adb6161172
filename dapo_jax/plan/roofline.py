"""Computes the minimum time of each phase of a step: its operations and bytes divided by the chip's peak rates (a roofline).

This is a lower bound, not a measurement. It ignores latency, dependencies between operations, and the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from dapo_jax.config import TrainConfig
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import batch_shards
from dapo_jax.plan.compiled import CompiledProgram
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.topologies import Topology
from dapo_jax.plan.workload import MeshSizes, Workload
from dapo_jax.run.sampler_setup import rollout_spec
from dapo_jax.run.teacher_setup import teacher_of
from dapo_jax.run.updater_setup import has_reference, objective_of
from dapo_jax.sampling.cache_sizes import PageSizes
from dapo_jax.sampling.prefill import program_suffix
from dapo_jax.sampling.prompt_packing import PrefillShape


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one phase in each step on each device."""

    phase: str
    runs: int | float
    """Executions of the phase's program per step."""
    flops: int | float
    """Operations of all executions, including recomputation and padding."""
    useful_flops: int | float
    """Operations of the model's matrix products, without padding and recomputation; used for model FLOPs utilisation."""
    hbm_bytes: int | float
    """Minimum bytes that the phase reads from and writes to device memory."""
    ici_bytes: int | float = 0
    """Bytes received in the phase's collectives over the links between devices; 0 if the program was not compiled."""
    network_bytes: int | float = 0
    """Bytes received in the phase's collectives over the network between machines with GPUs."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The minimum time of one phase in a step: the longest of four times, assuming that the four overlap completely."""

    work: Work
    compute_s: float
    hbm_s: float
    ici_s: float
    network_s: float
    seconds: float
    limit: str
    """The name of the longest time: compute, hbm, ici or network."""
    measured_s: float | None
    """The time at the share of the roofline that was measured on this chip with another model, or None if nothing was measured."""


def bound(work: Work, topology: Topology) -> Bound:
    """Returns the minimum time of a phase: its `work`, divided by the peak rates of the topology's devices."""
    chip = topology.chip
    times = {
        "compute": work.flops / chip.peak_flops,
        "hbm": work.hbm_bytes / chip.device_hbm_bytes_s,
        "ici": work.ici_bytes / chip.device_ici_bytes_s,
        "network": work.network_bytes / topology.network_bytes_s,
    }
    limit = max(times, key=lambda name: times[name])
    each = {f"{name}_s": value for name, value in times.items()}
    share = chip.measured.get(work.phase)
    return Bound(
        work=work, seconds=times[limit], limit=limit, measured_s=share and times[limit] / share, **each
    )


def work_of(
    config: TrainConfig,
    decoder: DecoderConfig,
    work: Workload,
    sizes: MeshSizes,
    pages: PageSizes,
    programs: Sequence[CompiledProgram] = (),
) -> list[Work]:
    """Returns the work of each phase of a step. The received bytes are counted in the compiled `programs`."""
    # Most prompts are prefilled by the programs whose names begin with this prefix.
    prefill = "prefill_rows" if prefill_shape_of(config).rows > 1 else "prefill_row"
    of_layers = [program_suffix(stack) for stack, _ in decoder.places]
    in_each_run = {
        "transfer": ["transfer_ends", *[f"transfer{suffix}" for suffix in of_layers]],
        "prefill": [
            f"{prefill}_embed",
            f"{prefill}_head",
            *[f"{prefill}{suffix}" for suffix in of_layers],
        ],
        "decode": ["generate"],
        "log-probabilities": ["score"],
        "teacher's log-probabilities": ["score_teacher"],
        "update": ["update_add_longest", "update_apply"],
    }
    traffic = {one.name: one.traffic for one in programs}

    def with_traffic(phase: Work) -> Work:
        kinds = [kind for name in in_each_run[phase.phase] for kind in traffic.get(name, ())]
        received = phase.runs * sum(kind.received_bytes for kind in kinds)
        over_network = phase.runs * sum(kind.network_bytes for kind in kinds)
        return replace(phase, ici_bytes=received - over_network, network_bytes=over_network)

    found = [
        _transfer(config, decoder, sizes),
        _prefill(config, decoder, work, sizes),
        _decode(config, decoder, work, sizes, pages),
        *_trained(config, decoder, work, sizes),
    ]
    return [with_traffic(phase) for phase in found]


def prefill_shape_of(config: TrainConfig) -> PrefillShape:
    """Returns the shape of one prefill call, such as its number of rows and their width."""
    return rollout_spec(config, samplers=1).engine.prefill_shape


def in_flight(config: TrainConfig, work: Workload, pages: PageSizes, samplers: int) -> float:
    """Returns the number of responses that a sampler decodes in parallel.

    This is the minimum of its slots, its share of `rollout.in_flight`, and the number of responses that fit in its pages. A response
    is assumed to need the mean context plus half a page. Pages that are shared within a group are counted once per response.
    """
    most = [float(config.sampling.slots)]
    if pages.runs_out:  # If pages cannot run out, every slot has room for the longest response.
        most.append(pages.tokens / pages.held(work.context))
    if config.rollout.in_flight:
        most.append(config.rollout.in_flight / samplers)
    return min(most)


def decode_steps(work: Workload, samplers: int, parallel: float) -> float:
    """Returns a sampler's decode steps for `parallel` responses at a time. A wave takes at least one step per token of its longest response."""
    tokens = work.responses * work.response_mean / samplers
    return max(tokens / parallel, work.longest if work.waves else 0.0)


def matrix_parameters(decoder: DecoderConfig, tokens: int | float = 1) -> int | float:
    """Returns the number of weights in the layers' matrices and adapters that `tokens` tokens use, without embedding and unembedding.

    Of the experts, tokens use a share (see `Mlp.used`).
    """
    adapters = 0 if decoder.lora is None else decoder.trained_parameters
    return decoder.of_all_layers(lambda kind: kind.matrix_parameters(decoder, tokens)) + adapters


def forward_flops(
    decoder: DecoderConfig, *, tokens: int | float = 0, pairs: int | float = 0, logits: int | float = 0, decoding: bool = False
) -> int | float:  # fmt: skip
    """Returns the operations of a forward pass. A matrix product of [m, k] and [k, n] requires 2 m k n operations.

    `tokens` is the number of tokens that pass through the layers, and `logits` the number of tokens for which logits are computed.
    `pairs` is the number of query-key pairs in each layer with pages. `decoding`: the layers process one token at a time, not whole rows.
    """
    mixers = [kind.mixer.flops(decoder, decoding=decoding) for kind in decoder.kinds if kind.mixer]
    of_tokens, of_pairs = (sum(flops) for flops in zip(*mixers, strict=True))
    layers = 2 * matrix_parameters(decoder) + of_tokens
    unembedding = 2 * _unembedding_parameters(decoder)
    return layers * tokens + of_pairs * pairs + unembedding * logits


def read_share(decoder: DecoderConfig, last: int | float, *, first: int | float = 0) -> float:
    """Returns the share of causal query-key pairs that the layers with pages compute, for the queries after token `first` up to token `last` of a sequence.

    If a layer reads the last w tokens, the token at position i (from 1 on) attends to min(i, w) tokens.
    """

    def pairs(read: int) -> float:
        most = read or math.inf
        return _pairs(last, most) - _pairs(first, most)

    read = [state.tokens for state in decoder.read]
    return sum(map(pairs, read)) / (pairs(0) * len(read))


def _pairs(tokens: int | float, most: int | float) -> float:
    """Returns the sum of min(i, most) over the positions i of a sequence of `tokens` tokens."""
    near = min(tokens, most)
    return near * (near + 1) / 2 + (most * (tokens - near) if tokens > near else 0.0)


def cache_bytes_per_token(config: TrainConfig, decoder: DecoderConfig, tensor: int = 1) -> int:
    """Returns the size in bytes of one token's keys and values across all layers with pages, with the scales of an int8 cache, on one of `tensor` devices."""
    dtype = config.model.compute_dtype
    size, scale = (1, 4) if config.sampling.cache_dtype else (jnp.dtype(dtype).itemsize, 0)
    return sum(
        state.arrays * state.heads_on(tensor) * (state.head_dim * size + scale) for state in decoder.paged
    )


def decode_weight_parameters(decoder: DecoderConfig, tokens: int | float = 1) -> int | float:
    """Returns the number of weights that a step over `tokens` tokens reads: matrices and unembedding. The embedding row of each token is not counted."""
    return matrix_parameters(decoder, tokens) + _unembedding_parameters(decoder)


def _unembedding_parameters(decoder: DecoderConfig) -> int:
    return decoder.vocab_size * decoder.embed_dim


def _sampler_bytes(parameters: int | float, config: TrainConfig, sizes: MeshSizes) -> float:
    """Returns the size in bytes, on each device, of `parameters` sampler weights, without the small scales of int8 weights."""
    each = 1 if config.sampling.weight_dtype else jnp.dtype(config.model.compute_dtype).itemsize
    return parameters * each / sizes.sampler["tensor"]


def _transfer(config: TrainConfig, decoder: DecoderConfig, sizes: MeshSizes) -> Work:
    """Counts reads of the float32 trained parameters, and writes of the sampler's weights."""
    reads = 4 * decoder.trained_parameters / (sizes.train["fsdp"] * sizes.train["tensor"])
    writes = _sampler_bytes(decoder.trained_parameters, config, sizes)
    return Work(phase="transfer", runs=1, flops=0, useful_flops=0, hbm_bytes=reads + writes)


def _prefill(config: TrainConfig, decoder: DecoderConfig, work: Workload, sizes: MeshSizes) -> Work:
    """Counts the prefill of each prompt, one re-prefill of each response in flight in every step, and the re-prefills between turns."""
    shape, devices = prefill_shape_of(config), sizes.sampler_devices
    again = work.responses * work.reprefills
    lengths = (work.prompt_mean, work.context, work.between)
    counts = [each / sizes.samplers for each in (work.prompts, config.rollout.in_flight, again)]
    read = list(zip(lengths, counts, strict=True))

    def flops(length: float) -> int | float:
        pairs = length * (length + 1) / 2 * read_share(decoder, length)
        return forward_flops(decoder, tokens=length, pairs=pairs, logits=1)

    once, *more = (count * flops(length) for length, count in read)
    runs = sum(count * _calls(shape, length) for length, count in read)
    return Work(
        phase="prefill",
        runs=runs,
        flops=(once + sum(more)) / devices,
        useful_flops=once / devices,
        hbm_bytes=runs * _sampler_bytes(decode_weight_parameters(decoder, shape.width), config, sizes),
    )


def _calls(shape: PrefillShape, length: float) -> float:
    """Returns the number of prefill calls per sequence: a fraction if sequences share a call, or one call per chunk if a row is too short."""
    if length > shape.width:
        return float(math.ceil(length / shape.width))
    return 1 / (shape.rows * max(1.0, min(float(shape.row_prompts), shape.width // length)))


def _decode(
    config: TrainConfig, decoder: DecoderConfig, work: Workload, sizes: MeshSizes, pages: PageSizes
) -> Work:
    """Counts the decode steps. Each reads the weights once, and the cached tokens of every response on the device. It also reads and writes their states of fixed size."""
    parallel = in_flight(config, work, pages, sizes.samplers)
    steps = decode_steps(work, sizes.samplers, parallel)
    calls = steps / config.sampling.steps_per_call
    tokens = work.responses * work.response_mean / sizes.samplers
    # Slots read only the pages with tokens that a layer attends to, if the kernel for TPU is used. Other caches read more.
    seen = work.context * read_share(decoder, work.sequence, first=work.prompt_mean)
    flops = forward_flops(decoder, tokens=tokens, pairs=tokens * seen, logits=tokens, decoding=True)
    flops /= sizes.sampler_devices
    # The heads are split over `tensor`, the slots over the other axes.
    each = cache_bytes_per_token(config, decoder, sizes.sampler["tensor"])
    each *= len(decoder.read) / len(decoder.paged)
    fixed = 2 * decoder.state_bytes / sizes.sampler["tensor"]
    cache = tokens / batch_shards(sizes.sampler) * (seen * each + fixed)
    # The slots are split over the batch axes, so each device reads the experts of its own tokens.
    weights = decode_weight_parameters(decoder, parallel / batch_shards(sizes.sampler))
    read = steps * _sampler_bytes(weights, config, sizes) + cache
    return Work(phase="decode", runs=calls, flops=flops, useful_flops=flops, hbm_bytes=read)


def _trained(config: TrainConfig, decoder: DecoderConfig, work: Workload, sizes: MeshSizes) -> list[Work]:
    """Returns the work of scoring, if any, and of the updates.

    Scoring computes the trainer's log-probabilities for all updates except the first (all with `loss.select`), and the log-probabilities of a
    reference policy and a teacher for all updates. With `teacher.kl=full`, the teacher's forward pass is part of the update.
    """
    devices, count = sizes.devices, work.trained * work.sequence
    scored = work.updates - 1 if config.loss.old_logprobs == "trainer" else 0
    scored = scored if config.loss.select == "all" else work.updates
    scored += work.updates if has_reference(config, objective_of(config.loss)) else 0
    # The numbers of tokens and of query-key pairs include padding, and attention is causal over the whole row.
    tokens = float(work.microbatches * work.microbatch_tokens)
    pairs = tokens * (config.row_tokens + 1) / 2

    def forward(decoder: DecoderConfig) -> tuple[float, float, float]:
        near, nearest = (read_share(decoder, length) for length in (work.sequence, config.row_tokens))
        own = forward_flops(decoder, tokens=count, pairs=work.trained * work.attended * near, logits=count)
        one = forward_flops(decoder, tokens=tokens, pairs=pairs * nearest, logits=tokens)
        # Each pass over a microbatch reads the gathered weights in the compute dtype. They remain sharded over the tensor axis.
        used = decoder.parameters - (0 if decoder.tied_embeddings else _unembedding_parameters(decoder))
        used += 0 if decoder.lora is None else decoder.trained_parameters
        return own, one, jnp.dtype(config.model.compute_dtype).itemsize * used / sizes.train["tensor"]

    own, one, weights = forward(decoder)
    # The backward pass has two matrix products for each one in the forward pass. Full rematerialisation repeats the forward pass.
    passes = 4 if config.model.remat == "full" else 3
    held = decoder.trained_parameters / (sizes.train["fsdp"] * sizes.train["tensor"])
    # Each microbatch reads, adds to and writes float32 gradients; AdamW reads 4 arrays and writes 3.
    optimizer = work.microbatches * 3 * 4 * held + 7 * 4 * held
    # The gradients of frozen base matrices are not computed, so their operations are subtracted.
    frozen = 0 if decoder.lora is None else matrix_parameters(decoder.base) + _unembedding_parameters(decoder)
    updates = Work(
        phase="update",
        runs=work.updates,
        flops=work.updates * (passes * one - 2 * frozen * tokens) / devices,
        useful_flops=(3 * own - 2 * frozen * count) / devices,
        hbm_bytes=work.updates * (work.microbatches * passes * weights + optimizer),
    )
    scorings = [("log-probabilities", scored, decoder)]
    if config.teacher.source:
        taught = decoder if config.teacher.is_self else decoder_of(teacher_of(config), section="teacher")
        scorings.append(("teacher's log-probabilities", work.updates, taught))
    found = []
    for phase, runs, scorer in scorings:
        own, one, weights = forward(scorer)
        flops, useful = runs * one / devices, runs / work.updates * own / devices
        read = runs * work.microbatches * weights
        found.append(Work(phase=phase, runs=runs, flops=flops, useful_flops=useful, hbm_bytes=read))
    if config.teacher.source and config.teacher.kl == "full":
        taught = found.pop()
        sums = {
            name: getattr(updates, name) + getattr(taught, name)
            for name in ("flops", "useful_flops", "hbm_bytes")
        }
        updates = replace(updates, **sums)
    return [*(each for each in found if each.runs), updates]
