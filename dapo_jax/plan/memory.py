"""Bytes on one device: of arrays by their places, of compiled programs, and of all that is there at the same time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

MARGIN = 0.05
"""Part of a device's memory that a plan leaves free: for fragments, and for what is on the device beside the programs' arrays."""


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """One compiled program, as the compiler assigned its buffers."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that lie where donated arguments lay."""
    temporaries: int
    code: int

    @property
    def needed(self) -> int:
        """All of it."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def beside_arguments(self) -> int:
        """The bytes that it adds to what is there already."""
        return self.needed - self.arguments

    @property
    def kept(self) -> int:
        """Arguments that are not handed back."""
        return self.arguments - self.aliased


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A time at which certain things are on a device together."""

    name: str
    program: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes of what outlives a program; of one device."""

    state: int
    """Parameters and moments."""
    moments: int = 0
    """The part of it that `optimizer.offload` keeps in the host's memory; 0 where they are there already."""
    reference: int = 0
    """The reference policy's parameters, with `loss.kl_coef`."""
    base: int = 0
    """The frozen weights below adapters."""
    shares_base: bool = False
    """Whether the sampler has the same arrays."""
    sampler_base: int = 0
    """The sampler's own copy of them; 0 where it has none."""
    weights: int = 0
    """The sampler's, but for these."""
    rotations: int = 0
    """Cosines and sines of all positions of a slot. Once a run has sampled they stay."""
    minibatch: int = 0
    """The arrays of one update."""
    shorter: int = 0
    """The part of them whose rows are shorter than the longest."""
    gradient: int = 0
    """The sum of the gradients so far, between the programs of an update of several row lengths; 0 where every update is one program."""
    prefix: int = 0
    """The prompts that one call of prefill has read."""
    buffers: int = 0
    """Keys and values of a sequence that is read part by part, and what flows through the layers of a part; 0 where none is."""
    reread: int = 0
    """The same sequence once it is read, for its slot."""
    waiting: int = 0
    """Where rollouts stay in flight, or prompts are longer than a row, one more such sequence: it waits for its slot while another one is read part by part."""
    decode_state: int = 0
    """The cache, and the logits of every slot."""
    paused: int = 0
    """The logits of responses that pause beside the slots; 0 where no more are in flight than there are slots."""


def memory_of(compiled: jax.stages.Compiled) -> ProgramMemory:
    """The memory that the compiler states; the host's is left out."""
    told: Any = compiled.memory_analysis()
    return ProgramMemory(
        arguments=told.argument_size_in_bytes,
        outputs=told.output_size_in_bytes,
        aliased=told.alias_size_in_bytes,
        temporaries=told.temp_size_in_bytes,
        code=told.generated_code_size_in_bytes,
    )


def as_compiled(there: Resident, programs: Mapping[str, ProgramMemory]) -> Resident:
    """The same with what the compiled programs say of their arguments: on a TPU arrays are padded to tiles of 8 x 128, which can
    double a cache whose heads have 64 dimensions."""
    generate, update, add = (programs.get(name) for name in ("generate", "update", "update_add_longest"))
    if generate is not None:
        # What it is given back is the decode state, the rest of its arguments the weights and the rotations.
        frozen = there.base if there.shares_base else there.sampler_base
        weights = generate.kept - there.rotations - frozen
        there = replace(there, decode_state=generate.aliased, weights=weights)
    if update is not None:
        minibatch = update.kept - there.base + there.shorter
        there = replace(there, state=update.aliased, minibatch=minibatch)
    if add is not None:
        there = replace(there, gradient=add.aliased)
    for shape, kept in (("row", "prefix"), ("rows", "prefix"), ("part", "reread")):
        if (insert := programs.get(f"insert_{shape}")) is not None:
            there = replace(there, **{kept: insert.kept})
    return replace(there, waiting=there.reread if there.waiting else 0)


def together(program: str, there: Resident, *, updates: int) -> tuple[str, dict[str, int]] | None:
    """The time at which a program runs, in words, and what lies on a device beside what the program adds; None if that is less than beside others.

    Between steps the sampler's weights are gone, but for frozen ones. While it samples, the weights, the cache and up to two batches of prefilled prompts lie
    beside the train state: the responses of one call still wait for slots when the next one reads; and a response that had given its
    pages back lies there once more. The minibatches of all updates are put on the device before the first, and are gone after the last.
    """
    between = {
        "train state": there.state,
        "frozen weights": there.base,
        "sampler's frozen weights": there.sampler_base,
        "reference policy": there.reference,
        "rotations": there.rotations,
    }
    updating = {**between, "minibatches": updates * there.minibatch}
    sampler = {**between, "sampler weights": there.weights}
    cache = {**sampler, "decode state": there.decode_state, "paused responses": there.paused}
    reading = {**cache, "prefilled prompts": 2 * there.prefix}
    one, buffers, again = (
        {"prefilled prompts": there.prefix},
        {"sequence read in parts": there.buffers},
        {"sequence that waits for its slot": there.reread},
    )
    # A long sequence may be read to its end, or half read, while others are decoded.
    longer = {**cache, **one, **(buffers if there.waiting or there.buffers > there.reread else again)}
    longer |= {"sequence that waits for its slot": there.waiting} if there.waiting else {}
    gradient = {**updating, "gradient": there.gradient}
    known: dict[str, tuple[str, dict[str, int]]] = {
        "transfer": ("transfer: its last layer", sampler),
        "transfer_ends": ("transfer: embeddings", sampler),
        "prefill_part": ("sampling: a part of a long sequence", {**cache, **one, **buffers}),
        "prefill_kept": ("sampling: the end of a long sequence", {**cache, **one, **buffers, **again}),
        "fill_part": ("sampling: a response starts again", {**cache, **one, **again}),
        "insert_part": ("sampling: a response starts again", {**cache, **one, **again}),
        "paused": ("sampling: responses pause", {**reading, "paused responses": 0}),
        "generate": ("sampling: decode", max(reading, longer, key=lambda parts: sum(parts.values()))),
        "score": ("log-probabilities", updating),
        "score_shortest": ("log-probabilities, shortest rows", updating),
        "update": ("update", updating),
        "update_begin": ("update of several row lengths: begins", updating),
        "update_add_longest": ("update of several row lengths: longest rows", gradient),
        "update_add_shortest": ("update of several row lengths: shortest rows", gradient),
        "update_apply": ("update of several row lengths: change", gradient),
    }
    if program in known:
        return known[program]
    if program.startswith("prefill") and program != "prefill_empty":
        return "sampling: prefill", reading
    return ("sampling: a response starts", reading) if program.startswith(("fill", "insert")) else None


def phases(programs: Mapping[str, ProgramMemory], there: Resident, *, updates: int) -> list[Phase]:
    """The arrays that are resident together, for each program that was compiled (`together`). A program's code stays on the device once it has run."""
    code = sum(memory.code for memory in programs.values())
    return [
        Phase(
            name=found[0],
            program=program,
            parts={
                **{part: size for part, size in found[1].items() if size},
                "programs": code,
                f"added by {program}": memory.beside_arguments - memory.code,
            },
        )
        for program, memory in programs.items()
        if (found := together(program, there, updates=updates)) is not None
    ]
