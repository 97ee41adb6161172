"""The least time that a step's phases can take: work over the chip's peaks, whichever of compute, memory and interconnect is longest.

A roofline, not a measurement: it knows no latency, no dependence of one product on the last, no host. What it gives is a bound, and
how phases compare.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapo_jax.config import TrainConfig
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.plan.chips import Chip
from dapo_jax.plan.collectives import Traffic
from dapo_jax.plan.costs import (
    cache_bytes_per_token,
    decode_weight_parameters,
    forward_flops,
    item,
    matrix_parameters,
    unembedding_parameters,
    weight_bytes,
)
from dapo_jax.plan.mesh_sizes import Layout, batch_shards
from dapo_jax.plan.workload import Workload
from dapo_jax.run.programs import sampled_decoder
from dapo_jax.run.sampler_setup import prefill_of
from dapo_jax.sampling.pages import PageSizes
from dapo_jax.sampling.prompt_packing import PrefillShape


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one phase in a step, on each device."""

    phase: str
    runs: int | float
    """Runs of its program in a step."""
    flops: int | float
    """Operations of all runs, with what is computed twice and with padding."""
    useful_flops: int | float
    """Operations of the model's own products over the tokens that count, computed once: what model FLOPs utilisation is taken from."""
    hbm_bytes: int | float
    """The least that its products read and write."""
    ici_bytes: int | float
    """Received in its collectives; 0 if the program was not compiled."""
    kernel_flops: int | float = 0
    """The part of `flops` that a kernel for attention does, where there is one."""
    kernel_hbm_bytes: int | float = 0
    """The part of `hbm_bytes` that it reads."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least time of one phase in a step."""

    work: Work
    compute_s: float
    hbm_s: float
    ici_s: float

    @property
    def seconds(self) -> float:
        """The longest of the three: as if they overlapped entirely."""
        return max(self.compute_s, self.hbm_s, self.ici_s)

    @property
    def limit(self) -> str:
        """Which of the three it is."""
        return max(("compute", "hbm", "ici"), key=lambda name: getattr(self, f"{name}_s"))


def bound(work: Work, chip: Chip) -> Bound:
    """`work` over the peaks of `chip`."""
    return Bound(
        work=work,
        compute_s=work.flops / chip.device_flops,
        hbm_s=work.hbm_bytes / chip.device_hbm_bytes_s,
        ici_s=work.ici_bytes / chip.device_ici_bytes_s,
    )


def work_of(
    config: TrainConfig,
    decoder: DecoderConfig,
    work: Workload,
    layout: Layout,
    pages: PageSizes,
    traffic: Mapping[str, Sequence[Traffic]],
) -> list[Work]:
    """The phases of a step in their order; `pages` are those of a sampler's cache, `traffic` is what one run of each compiled program receives."""
    of_program = {name: float(sum(kind.received_bytes for kind in kinds)) for name, kinds in traffic.items()}
    received = {
        phase: sum(times * of_program.get(name, 0.0) for name, times in calls)
        for phase, calls in calls_of(config, decoder).items()
    }
    sampled = sampled_decoder(decoder, config.sampling)
    return [
        _transfer(config, decoder, layout, received["transfer"]),
        _prefill(config, sampled, work, layout, received["prefill"]),
        _decode(config, sampled, work, layout, pages, received["decode"]),
        *_trained(config, decoder, work, layout, received),
    ]


def calls_of(config: TrainConfig, decoder: DecoderConfig) -> dict[str, list[tuple[str, int]]]:
    """Phase -> its programs, and how often each is called in one of its runs."""
    prefill = _prefill_program(config)
    return {
        "transfer": [("transfer", decoder.layers), ("transfer_ends", 1)],
        "prefill": [(f"{prefill}_embed", 1), (prefill, decoder.layers), (f"{prefill}_head", 1)],
        "decode": [("generate", 1)],
        "score": [("score", 1)],
        "update": [("update", 1)],
    }


def _prefill_shape(config: TrainConfig) -> PrefillShape:
    how = {"in_flight": config.rollout.in_flight, "has_turns": bool(config.environment.source)}
    return prefill_of(
        config.sampling, config.batch.group_size, max_prompt_tokens=config.data.max_prompt_tokens, **how
    )


def _prefill_program(config: TrainConfig) -> str:
    """The program of a layer that reads most of the prompts."""
    return "prefill_rows" if _prefill_shape(config).rows > 1 else "prefill_row"


def _transfer(config: TrainConfig, decoder: DecoderConfig, layout: Layout, received: float) -> Work:
    """Reads the float32 parameters that are trained where they lie, and a base that they are merged with; writes the sampler's share of what it is given."""
    train, tensor, dtype = layout.train, layout.sampler["tensor"], config.model.compute_dtype
    merged = item(dtype) * decoder.parameters if config.sampling.merge_lora else 0
    reads = (4 * decoder.trained_parameters + merged) / (train["fsdp"] * train["tensor"])
    written = decoder.parameters if merged else decoder.trained_parameters
    writes = weight_bytes(written, config.sampling, compute_dtype=dtype) / tensor
    return Work(
        phase="transfer", runs=1, flops=0, useful_flops=0, hbm_bytes=reads + writes, ici_bytes=received
    )


def _prefill(
    config: TrainConfig, decoder: DecoderConfig, work: Workload, layout: Layout, received: float
) -> Work:
    """Each prompt once, as many as a call's rows hold; the devices of a sampler share its prompts. What is in flight is read again in each step,
    each response as if it had the mean context, and so are episodes between turns that read them again."""
    shape, devices = _prefill_shape(config), layout.sampler_devices
    read = [
        (length, sequences / layout.samplers)
        for length, sequences in (
            (work.prompt_mean, work.prompts),
            (work.context, config.rollout.in_flight),
            (work.between, work.responses * work.readings),
        )
    ]
    once, *more = (
        count * forward_flops(decoder, tokens=length, pairs=length * (length + 1) / 2, logits=1)
        for length, count in read
    )
    runs = sum(count * _calls(shape, length) for length, count in read)
    return Work(
        phase="prefill",
        runs=runs,
        flops=(once + sum(more)) / devices,
        useful_flops=once / devices,
        hbm_bytes=runs * decode_weight_bytes(config, decoder, layout),
        ici_bytes=runs * received,
    )


def _calls(shape: PrefillShape, length: float) -> float:
    """Calls of prefill that read a sequence: one of those for all rows of which each holds several, or one for each part of a longer one."""
    if length > shape.width:
        return float(math.ceil(length / shape.width))
    return 1 / (shape.rows * max(1.0, min(float(shape.row_prompts), shape.width // length)))


def room(config: TrainConfig, work: Workload, pages: PageSizes) -> float:
    """Responses that a sampler can decode side by side: as many as it has slots, or as its pages hold, each half a page more than its mean
    context. Prompts whose pages a group shares are counted for each response."""
    held, slots = work.context + pages.page_tokens / 2, float(config.sampling.slots)
    if not pages.runs_out:
        return slots  # there is room for the longest in every slot
    return min(slots, pages.pools * pages.pool_pages * pages.page_tokens / held)


def in_flight(config: TrainConfig, work: Workload, pages: PageSizes, samplers: int) -> float:
    """Responses that a sampler decodes side by side: those that it has room for, or its share of `rollout.in_flight`."""
    most = room(config, work, pages)
    return min(most, config.rollout.in_flight / samplers) if config.rollout.in_flight else most


def decode_steps(work: Workload, samplers: int, together: float) -> float:
    """Tokens that a sampler decodes one after another: its share of all over what is in flight; and in waves no less than the longest response."""
    tokens = work.responses * work.response_mean / samplers
    return max(tokens / together, work.longest if work.waves else 0.0)


def _decode(
    config: TrainConfig, decoder: DecoderConfig, work: Workload, layout: Layout, pages: PageSizes, received: float
) -> Work:  # fmt: skip
    """Weights are read once a step for all responses of a device, and of each what its pages hold, as the kernels do."""
    sampler, steps_per_call, dtype = (
        layout.sampler,
        config.sampling.steps_per_call,
        config.model.compute_dtype,
    )
    together = in_flight(config, work, pages, layout.samplers)
    steps = decode_steps(work, layout.samplers, together)
    tokens = work.responses * work.response_mean / layout.samplers
    flops = forward_flops(decoder, tokens=tokens, pairs=tokens * work.context, logits=tokens)
    flops /= layout.sampler_devices
    # The heads are split over `tensor`, the slots over the other axes. Where fewer are left than slots, each step reads less.
    each = cache_bytes_per_token(decoder, config.sampling, compute_dtype=dtype) / sampler["tensor"]
    cache = tokens / batch_shards(sampler) * work.context * each
    return Work(
        phase="decode",
        runs=steps / steps_per_call,
        flops=flops,
        useful_flops=flops,
        hbm_bytes=steps * decode_weight_bytes(config, decoder, layout) + cache,
        ici_bytes=steps / steps_per_call * received,
        kernel_flops=forward_flops(decoder, tokens=0, pairs=tokens * work.context, logits=0)
        / layout.sampler_devices,
        kernel_hbm_bytes=cache,
    )


def decode_weight_bytes(config: TrainConfig, decoder: DecoderConfig, layout: Layout) -> float:
    """The bytes of the weights that a device reads for one decode step."""
    parameters, dtype = decode_weight_parameters(decoder), config.model.compute_dtype
    return weight_bytes(parameters, config.sampling, compute_dtype=dtype) / layout.sampler["tensor"]


def _trained(
    config: TrainConfig,
    decoder: DecoderConfig,
    work: Workload,
    layout: Layout,
    received: Mapping[str, float],
) -> list[Work]:
    """Log-probabilities of all updates but the first (and of all under a reference policy), then the updates."""
    trainer, devices = config.loss.old_logprobs == "trainer", layout.devices
    scored = (work.updates - 1 if trainer else 0) + (work.updates if config.loss.kl_coef else 0)
    own = forward_flops(
        decoder,
        tokens=work.trained * work.sequence,
        pairs=work.trained * work.attended,
        logits=work.trained * work.sequence,
    )
    # With its padding; a row's attention is causal over the whole row.
    row, tokens = config.row_tokens, float(work.microbatches * work.microbatch_tokens)
    pairs = tokens * (row + 1) / 2
    one = forward_flops(decoder, tokens=tokens, pairs=pairs, logits=tokens)
    attention = forward_flops(decoder, tokens=0, pairs=pairs, logits=0)
    # The gradient is two products for each of the forward pass; rematerialising all computes the forward pass again.
    passes = 4 if config.model.remat == "full" else 3
    weights = _microbatch_weight_bytes(config, decoder, layout)
    held = decoder.trained_parameters / (layout.train["fsdp"] * layout.train["tensor"])
    # Gradients are read, added to and written in float32 for each microbatch; AdamW reads 4 arrays and writes 3.
    optimizer = work.microbatches * 3 * 4 * held + 7 * 4 * held
    made = [
        Work(
            phase="update",
            runs=work.updates,
            flops=work.updates * (passes * one - _not_differentiated(decoder, tokens)) / devices,
            useful_flops=(3 * own - _not_differentiated(decoder, work.trained * work.sequence)) / devices,
            hbm_bytes=work.updates * (work.microbatches * passes * weights + optimizer),
            ici_bytes=work.updates * received["update"],
            kernel_flops=work.updates * passes * attention / devices,
        )
    ]
    if not scored:
        return made
    score = Work(
        phase="score",
        runs=scored,
        flops=scored * one / devices,
        useful_flops=scored / work.updates * own / devices,
        hbm_bytes=scored * work.microbatches * weights,
        ici_bytes=scored * received["score"],
        kernel_flops=scored * attention / devices,
    )
    return [score, *made]


def _not_differentiated(decoder: DecoderConfig, tokens: float) -> float:
    """Operations of the gradients of frozen matrices, which are not computed: below adapters those of all others."""
    if decoder.lora is None:
        return 0.0
    return 2 * (matrix_parameters(decoder.base) + unembedding_parameters(decoder)) * tokens


def _microbatch_weight_bytes(config: TrainConfig, decoder: DecoderConfig, layout: Layout) -> float:
    """The bytes that one pass over a microbatch reads: the weights, whole but for the tensor axis, in the compute dtype."""
    used = decoder.parameters - (0 if decoder.tied_embeddings else unembedding_parameters(decoder))
    used += 0 if decoder.lora is None else decoder.trained_parameters
    return item(config.model.compute_dtype) * used / layout.train["tensor"]
