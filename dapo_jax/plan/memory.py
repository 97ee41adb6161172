"""Bytes on one device: of arrays by their places, of compiled programs, and of all that is there at the same time."""

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
    reference: int
    """The reference policy's parameters, with `loss.kl_coef`."""
    weights: int
    """The sampler's."""
    minibatch: int
    """The arrays of one update."""
    prefix: int
    """Prefilled prompts whose responses wait for slots."""
    decode_state: int
    """The cache, and the logits of every slot."""


def memory_of(compiled: jax.stages.Compiled) -> ProgramMemory:
    """The memory that the compiler states."""
    told: Any = compiled.memory_analysis()
    return ProgramMemory(
        arguments=told.argument_size_in_bytes,
        outputs=told.output_size_in_bytes,
        aliased=told.alias_size_in_bytes,
        temporaries=told.temp_size_in_bytes,
        code=told.generated_code_size_in_bytes,
    )


def as_compiled(there: Resident, programs: dict[str, ProgramMemory]) -> Resident:
    """The same with what the compiled programs say of their arguments: on a TPU arrays are padded to tiles of 8 x 128, which can
    double a cache whose heads have 64 dimensions."""
    generate, update = (programs.get(name) for name in ("generate", "update"))
    if (
        generate is not None
    ):  # what it is given back is the decode state, the rest of its arguments the weights
        weights = generate.arguments - generate.aliased
        there = replace(there, decode_state=generate.aliased, weights=weights)
    if update is not None:
        there = replace(there, state=update.aliased, minibatch=update.arguments - update.aliased)
    return there


def phases(programs: dict[str, ProgramMemory], there: Resident, *, updates: int) -> list[Phase]:
    """The arrays that are resident together, for each program that was compiled.

    Between steps the sampler's weights are gone; while it samples, the weights, the cache and up to two batches of prefilled
    calls of prefilled prompts lie beside the train state. The minibatches of all updates are put on the device before the first. A program's code
    stays on the device once it has run.
    """
    always = {"train state": there.state, "reference policy": there.reference}
    code = sum(memory.code for memory in programs.values())
    minibatches = {"minibatches": updates * there.minibatch}
    sampling = {**always, "sampler weights": there.weights, "decode state": there.decode_state}
    reading = {**sampling, "prefilled prompts": there.prefix}
    resident: dict[str, tuple[str, dict[str, int]]] = {
        "transfer": ("transfer: its last layer", {**always, "sampler weights": there.weights}),
        "transfer_ends": ("transfer: embeddings", {**always, "sampler weights": there.weights}),
        **{name: ("sampling: prefill", reading) for name in programs if name.startswith("prefill")},
        **{
            name: ("sampling: a response starts", reading)
            for name in programs
            if name.startswith(("fill", "insert"))
        },
        "generate": ("sampling: decode", {**sampling, "prefilled prompts": 2 * there.prefix}),
        "score": ("log-probabilities", {**always, **minibatches}),
        "update": ("update", {**always, **minibatches}),
    }
    return [
        Phase(
            name=name,
            program=program,
            parts={
                **{part: size for part, size in parts.items() if size},
                "programs": code,
                f"added by {program}": programs[program].beside_arguments - programs[program].code,
            },
        )
        for program, (name, parts) in resident.items()
        if program in programs
    ]
