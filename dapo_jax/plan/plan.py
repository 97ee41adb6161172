"""A plan: programs compiled for a slice, or shapes alone, and what follows from them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from dapo_jax.config import TrainConfig
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.device_memory import device_bytes
from dapo_jax.plan.cache_fit import CacheFit, cache_fit
from dapo_jax.plan.collectives import Traffic, collectives
from dapo_jax.plan.estimate import Cost, Estimated, cost_of, estimates
from dapo_jax.plan.expected_step import ExpectedStep, Sampling, expected_step
from dapo_jax.plan.memory import MARGIN, Phase, ProgramMemory, Resident, as_compiled, memory_of, phases
from dapo_jax.plan.mesh_sizes import Layout, batch_shards, described
from dapo_jax.plan.programs import Programs
from dapo_jax.plan.refusals import Allocation, largest_arrays, refused
from dapo_jax.plan.roofline import Bound, Work, bound, calls_of, in_flight, room, work_of
from dapo_jax.plan.sampling_time import SamplingTime, sampling_time
from dapo_jax.plan.sizes import decoder_of
from dapo_jax.plan.topologies import Slice, devices_of
from dapo_jax.plan.workload import Assumptions, Workload, workload_of
from dapo_jax.run.disk_space import STATE_BYTES
from dapo_jax.run.policy import lora_of
from dapo_jax.sampling.pages import PageSizes

SCHEMA_VERSION = 3
"""The version of the JSON; a field that changes its meaning or goes away makes it one more."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program, compiled for a slice."""

    name: str
    compile_s: float
    memory: ProgramMemory | None
    """None: the compiler refused it, because it does not fit a device even alone."""
    traffic: list[Traffic] = field(default_factory=list)
    cost: Cost | None = None
    """By the compiler's cost model; None where there is no memory."""
    refusal: str = ""
    largest: list[Allocation] = field(default_factory=list)
    """The largest arrays: of a refused program as the compiler lists them, or its arguments; else of its instructions."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The needs of a configuration."""

    config: TrainConfig
    decoder: DecoderConfig
    work: Workload
    resident: Resident
    layout: Layout
    works: list[Work]
    """The phases of a step."""
    pages: PageSizes
    """The sizes of a sampler's cache."""
    token_bytes: int
    """Bytes of one token in the cache, on each of the devices that share its heads."""
    slice: Slice | None = None
    programs: list[Program] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    @property
    def bounds(self) -> list[Bound]:
        """The least time of each phase; none without a slice."""
        return [] if self.slice is None else [bound(work, self.slice.chip) for work in self.works]

    @property
    def estimates(self) -> dict[str, Estimated]:
        """XLA's estimate of each phase whose programs were compiled; none without a slice."""
        costs = {program.name: program.cost for program in self.programs if program.cost is not None}
        calls = calls_of(self.config, self.decoder)
        return {} if self.slice is None else estimates(self.works, calls, costs, self.slice.chip)

    @property
    def limit(self) -> int | None:
        """Bytes that a phase may take on one device; None without a slice."""
        return None if self.slice is None else int(self.slice.chip.device_hbm_bytes * (1 - MARGIN))

    @property
    def failures(self) -> list[str]:
        """The programs that do not fit, alone or with what lies beside them."""
        limit = self.limit
        alone = [program.name for program in self.programs if program.memory is None]
        together = [phase.program for phase in self.phases if limit is not None and phase.total > limit]
        return [*alone, *together]

    @property
    def fits(self) -> bool:
        """Whether all phases that were compiled do."""
        return not self.failures

    @property
    def in_flight(self) -> float:
        """Responses that a sampler decodes side by side."""
        return in_flight(self.config, self.work, self.pages, self.layout.samplers)

    def checkpoint_bytes(self, way: Sampling) -> float:
        """Bytes of a checkpoint on disk: weights and moments that are trained, and the tokens of responses that wait."""
        return STATE_BYTES * self.decoder.trained_parameters + way.kept_bytes

    def chip_hours(self, way: Sampling) -> float | None:
        """Hours of a chip that all steps of the run take together, without evaluations; None without a slice."""
        if self.slice is None or way.step_s is None:
            return None
        return self.config.steps * way.step_s * self.slice.chips / 3600

    @property
    def cache_fit(self) -> CacheFit | None:
        """The cache that fits beside all else; None where no phase was compiled that has one, or no sequence would fit."""
        return None if self.limit is None else cache_fit(
            self.config, self.decoder, self.work, self.pages, self.phases,
            limit=self.limit, token_bytes=self.token_bytes, spread=batch_shards(self.layout.sampler),
        )  # fmt: skip

    @cached_property
    def expected(self) -> ExpectedStep:
        """A step in waves and with rollouts in flight, simulated; in seconds if there is a slice."""
        return expected_step(
            self.config,
            self.work,
            self.pages,
            samplers=self.layout.samplers,
            room=room(self.config, self.work, self.pages),
            time=self._sampling_time,
            other_s=sum(
                (one.seconds for one in self.bounds if one.work.phase not in ("prefill", "decode")), 0.0
            ),
        )

    @property
    def _sampling_time(self) -> SamplingTime | None:
        """The times of a sampler; None without a slice."""
        if self.slice is None:
            return None
        decode = next(work for work in self.works if work.phase == "decode")
        received = decode.ici_bytes / (decode.runs * self.config.sampling.steps_per_call)
        return sampling_time(self.config, self.decoder, self.layout, self.slice.chip, step_ici_bytes=received)

    @property
    def step_s(self) -> float:
        """The roofline of a step, phase after phase."""
        return sum((bound.seconds for bound in self.bounds), 0.0)

    @property
    def mfu_bound(self) -> float:
        """Useful operations of a step over what the peak could do in its roofline's time."""
        useful = sum(bound.work.useful_flops for bound in self.bounds)
        return useful / (self.step_s * self.slice.chip.device_flops) if self.slice and self.step_s else 0.0


def plan(
    config: TrainConfig,
    *,
    slice: Slice | None = None,
    assumed: Assumptions | None = None,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The needs of `config`: on a slice with its programs compiled, else by shapes on the devices at hand.

    Raises:
        ConfigError: the configuration cannot run there, whatever the memory.
    """
    decoder_of(config.model)  # a model that is not covered is named before anything else is looked at
    devices = _at_hand(config) if slice is None else devices_of(slice)
    return plan_for(config, devices, slice=slice, assumed=assumed, only=only, say=say)


def plan_for(
    config: TrainConfig,
    devices: Sequence[Any] | None,
    *,
    slice: Slice | None = None,
    assumed: Assumptions | None = None,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The same on devices that are at hand or described; None: those that the configuration's mesh would need.

    `only` has the names, or the first words of the names, of the programs to
    compile; None is all, if there is a slice."""
    decoder = replace(decoder_of(config.model), lora=lora_of(config.lora))
    work = workload_of(config, assumed or Assumptions())
    host = devices_of(slice.one_host) if slice is not None and slice.hosts > 1 else None
    if slice is None:
        memory = None if devices is None else device_bytes(devices[0])
    else:
        memory = slice.chip.device_hbm_bytes
    programs = Programs(config, decoder, work, None if devices is None else list(devices), host, memory)
    lowered = programs.lowered() if slice is not None else {}
    compiled = [
        _compiled(programs, name, lower, unknown_trips=_trips(name, config, work), say=say)
        for name, lower in lowered.items()
        if only is None or any(name == wanted or name.startswith(f"{wanted}_") for wanted in only)
    ]
    memories = {program.name: program.memory for program in compiled if program.memory is not None}
    traffic = {program.name: program.traffic for program in compiled}
    resident = as_compiled(programs.resident, memories)
    return Plan(
        config=config,
        decoder=decoder,
        work=work,
        resident=resident,
        layout=programs.layout,
        works=work_of(config, decoder, work, programs.layout, programs.pages, traffic),
        pages=programs.pages,
        token_bytes=programs.token_bytes,
        slice=slice,
        programs=compiled,
        phases=phases(memories, resident, updates=work.updates),
    )


def _at_hand(config: TrainConfig) -> list[jax.Device] | None:
    """The devices that are here, if the mesh fits them or depends on how many there are; else None."""
    layout = described(config.parallel)
    return None if layout is not None and layout.devices != jax.device_count() else jax.devices()


def _trips(name: str, config: TrainConfig, work: Workload) -> tuple[int, ...]:
    """The number of turns of the loops whose ends depend on the data: over microbatches, over the tokens of one call."""
    return {
        "update": (work.microbatches,),
        "update_add_longest": (work.microbatches,),
        "score": (work.microbatches,),
        "generate": (config.sampling.steps_per_call,),
    }.get(name, ())


def _compiled(
    programs: Programs,
    name: str,
    lower: Callable[[], Any],
    *,
    unknown_trips: tuple[int, ...],
    say: Callable[[str], None],
) -> Program:
    began = time.monotonic()
    say(f"compiling {name}")
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = refused(error)
        if refusal is None:
            raise
        message, largest = refusal
        seconds = time.monotonic() - began
        largest = largest or programs.largest_inputs(name)
        return Program(name=name, compile_s=seconds, memory=None, refusal=message, largest=largest)
    text = compiled.as_text()
    return Program(
        name=name,
        compile_s=time.monotonic() - began,
        memory=memory_of(compiled),
        traffic=collectives(text, unknown_trips=unknown_trips),
        cost=cost_of(text, compiled.cost_analysis(), unknown_trips=unknown_trips),
        largest=largest_arrays(text),
    )
