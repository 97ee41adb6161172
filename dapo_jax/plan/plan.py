"""Plans a run: its memory, traffic and minimum time, from shapes or from its programs compiled for a topology."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax

from dapo_jax.config import ParallelConfig, TrainConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.config.loading import replaced
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel.mesh import AXES, Absent, AnyDevice, batch_shards
from dapo_jax.plan.compiled import CompiledProgram, ProgramMemory, compile_program
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.memory import MARGIN, CacheFit, Phase, Resident, as_compiled, phases
from dapo_jax.plan.programs import Programs
from dapo_jax.plan.roofline import Bound, Work, bound, in_flight, work_of
from dapo_jax.plan.topologies import Topology, devices_of, present_bytes
from dapo_jax.plan.workload import Assumptions, MeshSizes, Workload, workload_of
from dapo_jax.run.disk_space import STATE_BYTES, gib
from dapo_jax.run.sampler_setup import logits_bytes
from dapo_jax.run.sources import with_adapters
from dapo_jax.sampling.cache_sizes import PageSizes

HOST_DEVICES = 4
"""Assumed number of devices per host if the devices are absent, as on a TPU VM. Absent GPU machines are assumed to have as many GPUs as this machine."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory, work and minimum time of a configured run."""

    config: TrainConfig
    decoder: DecoderConfig
    work: Workload
    resident: Resident
    sizes: MeshSizes
    works: list[Work]
    """The work of each phase of a step."""
    pages: PageSizes
    """The sizes of a sampler's KV cache."""
    token_bytes: dict[int, int]
    """Bytes of one cached token in the layers of each page table (see `PageSizes`), on each device over which its heads are sharded."""
    topology: Topology | None = None
    programs: list[CompiledProgram] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    @property
    def bounds(self) -> list[Bound]:
        """The roofline of each phase; empty if there is no topology."""
        return [] if self.topology is None else [bound(work, self.topology) for work in self.works]

    @property
    def limit(self) -> int | None:
        """Maximum bytes that a phase may use on one device; None if there is no topology."""
        return None if self.topology is None else int(self.topology.chip.device_hbm_bytes * (1 - MARGIN))

    @property
    def failures(self) -> list[str]:
        """The names of the programs that do not fit, alone or together with the resident arrays."""
        limit = self.limit
        alone = [program.name for program in self.programs if program.memory is None]
        return alone + [phase.program for phase in self.phases if limit is not None and phase.total > limit]

    @property
    def fits(self) -> bool:
        """Whether all compiled programs fit."""
        return not self.failures

    @property
    def in_flight(self) -> float:
        """Number of responses that a sampler decodes in parallel."""
        return in_flight(self.config, self.work, self.pages, self.sizes.samplers)

    @property
    def cache_fit(self) -> CacheFit | None:
        """The largest KV cache with which every compiled phase stays within `limit`.

        None if no compiled phase has a KV cache, or if not even one sequence would fit. The heads of a cached token are sharded over a group of devices,
        and slots over several such groups. If more responses fit than there are slots, each additional slot also needs memory for its logits and its states of fixed size.
        """
        sampling = [phase.total for phase in self.phases if "decode state" in phase.parts]
        if not sampling or self.limit is None:
            return None
        pages, spread, slots = self.pages, batch_shards(self.sizes.sampler), self.config.sampling.slots
        left, slots = self.limit - max(sampling) + pages.bytes(self.token_bytes) // spread, slots // spread
        held = pages.held(self.work.context)
        response = pages.response_cache_bytes(held, self.token_bytes)
        if left > slots * response:
            logits = logits_bytes(self.decoder, 1) + self.decoder.state_bytes // self.sizes.sampler["tensor"]
            responses = (left + slots * logits) / (response + logits)
            tokens = responses * held
        else:
            tokens = pages.fitting(left, self.token_bytes) * pages.page_tokens
            responses = tokens / held
        whole, most = int(tokens) // pages.page_tokens * pages.page_tokens, max(slots, int(responses))
        if whole < pages.holder_pages() * pages.page_tokens:
            return None
        return CacheFit(tokens=whole * spread, slots=most * spread, in_flight=responses * spread)

    @property
    def cache_bytes(self) -> int:
        """Bytes of a sampler's KV cache, on all of its devices."""
        return self.pages.bytes(self.token_bytes) * self.sizes.sampler["tensor"]

    @property
    def response_bytes(self) -> int:
        """Bytes of the KV cache of one response of the maximum length, on all of its devices. A layer keeps only the pages of the tokens to which it attends."""
        tokens = self.pages.table_pages * self.pages.page_tokens
        return int(self.pages.response_cache_bytes(tokens, self.token_bytes)) * self.sizes.sampler["tensor"]

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the trained weights and their optimizer moments in a checkpoint."""
        return STATE_BYTES * self.decoder.trained_parameters

    @property
    def step_s(self) -> float:
        """Minimum seconds per step: the sum of the phases' rooflines."""
        return sum((bound.seconds for bound in self.bounds), 0.0)

    @property
    def chip_hours(self) -> float | None:
        """Minimum chip-hours for all steps, without evaluations; None if there is no topology."""
        return None if self.topology is None else self.config.steps * self.step_s * self.topology.chips / 3600

    @property
    def mfu_bound(self) -> float:
        """Maximum model FLOPs utilisation: useful operations of a step, divided by the peak operations in its minimum time."""
        useful, there = sum(bound.work.useful_flops for bound in self.bounds), self.topology
        return useful / (self.step_s * there.chip.peak_flops) if there and self.step_s else 0.0


def plan(
    config: TrainConfig,
    *,
    topology: Topology | None = None,
    assumed: Assumptions | None = None,
    only: Sequence[str] | None = None,
    samplers: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plans a run of `config`, from programs compiled for a topology or from shapes alone.

    Args:
        config: the run's configuration.
        topology: the devices to compile for. None: use shapes alone.
        assumed: quantities that the configuration does not determine, such as the mean response length.
        only: the programs to compile; `update` selects `update_begin` and other names with this prefix. None: all.
        samplers: if not 0, plans one of this number of sample workers instead, whose devices are `topology`.
        say: called with a message before each program is compiled.

    Raises:
        ConfigError: the configuration cannot run on these devices, regardless of memory.
    """
    decoder = with_adapters(decoder_of(config.model), config.lora)
    notes = tuple[str, ...]()
    if topology is None:
        devices, host, on_device = _devices_of_run(config.parallel), None, False
        memory = present_bytes()  # Absent devices have the same kind, and so the same memory.
    else:
        devices, host = devices_of(topology), devices_of(topology.one_host) if topology.hosts > 1 else None
        memory = topology.chip.device_hbm_bytes
        config, resized = _resized(config, len(devices))
        counted = "all offloaded moments are on the device during an update"
        on_device = config.optimizer.offload and bool(topology.chip.target)
        notes = (*resized, *topology.notes, *[counted] * on_device)
    work = workload_of(config, assumed or Assumptions())
    work = replace(work, notes=(*work.notes, *notes))
    # JAX cannot place arrays in the host memory of absent devices, so offloaded moments are subtracted below.
    placed = replaced(config, {"optimizer.offload": False}) if isinstance(devices[0], Absent) else config
    programs = Programs(placed, decoder, work, devices, host, memory, samplers)
    compiled = list[CompiledProgram]()
    per_machine = topology.host_chips if topology is not None and topology.has_network else 0
    with prefixed(""):  # the configuration may contain an invalid size
        there = programs.resident  # also builds trainer and sampler from shapes
    if config.optimizer.offload:
        # JAX cannot use the host memory of described GPUs, so their update is compiled with all moments on the device.
        loaded = there.moments * on_device
        there = replace(there, state=there.state - there.moments, moments=0, loaded=loaded)
    # The trip counts of loops that depend on the data: over microbatches, or over the decode steps of a call.
    trips = dict.fromkeys(("update_add_longest", "score", "score_teacher"), (work.microbatches,))
    trips["generate"] = (config.sampling.steps_per_call,)
    lowered = programs.lowered() if topology is not None else {}
    nothing = ProgramMemory(arguments=0, outputs=0, aliased=0, temporaries=0, code=0)
    known = phases(dict.fromkeys(lowered, nothing), there, updates=work.updates)
    fullest = max(known, key=lambda phase: phase.total, default=None)
    if memory and fullest is not None and fullest.total > memory * (1 - MARGIN):
        parts = ", ".join(f"{part} {gib(size)}" for part, size in fullest.parts.items() if size)
        needs = f"{fullest.name} needs more than {gib(fullest.total)} of {gib(memory)} on each device"
        say(f"will not fit: {needs} ({parts})")
    for name, lower in lowered.items():
        if only is None or any(name == wanted or name.startswith(f"{wanted}_") for wanted in only):
            say(f"compiling {name}")
            counting = {"trips": trips.get(name, ()), "per_machine": per_machine}
            compiled.append(compile_program(name, lower, **counting))
    memories = {program.name: program.memory for program in compiled if program.memory is not None}
    resident = as_compiled(there, memories)
    works = work_of(config, decoder, work, programs.sizes, programs.engine.page_sizes, compiled)
    if config.cluster.samplers:
        works = [phase for phase in works if (phase.phase in ("prefill", "decode")) == bool(samplers)]
    return Plan(
        config=config,
        decoder=decoder,
        work=work,
        resident=resident,
        sizes=programs.sizes,
        works=works,
        pages=programs.engine.page_sizes,
        token_bytes=programs.engine.token_bytes,
        topology=topology,
        programs=compiled,
        phases=phases(memories, resident, updates=work.updates),
    )


def _resized(config: TrainConfig, devices: int) -> tuple[TrainConfig, tuple[str, ...]]:
    """Returns `config` with an fsdp axis for this number of devices and the same rows per device, and a note if the configured axis is different."""
    sizes = [getattr(config.parallel, axis) for axis in AXES]
    fsdp, data, rows = config.parallel.fsdp, config.parallel.data, config.batch.rows_per_microbatch
    others = math.prod(sizes) // fsdp
    if -1 in sizes or math.prod(sizes) == devices or devices % others:
        return config, ()  # If the axes do not fit the devices, creating the mesh raises an error.
    changes = {
        "parallel.fsdp": devices // others,
        "batch.rows_per_microbatch": devices // others * data * max(1, rows // (data * fsdp)),
    }
    note = " ".join(f"{key}={value}" for key, value in changes.items())
    note += f", because the configured mesh has {math.prod(sizes)} devices, and the topology {devices}"
    return replaced(config, changes), (note,)


def _devices_of_run(parallel: ParallelConfig) -> Sequence[AnyDevice]:
    """Returns the present devices, or `Absent` placeholders if `parallel` needs a different number of devices."""
    present, sizes = jax.devices(), [getattr(parallel, axis) for axis in AXES]
    if -1 in sizes or math.prod(sizes) == len(present):
        return present
    platform, kind = present[0].platform, present[0].device_kind
    each = jax.local_device_count() if platform == "gpu" else HOST_DEVICES
    return [Absent(at, at // each, platform, kind) for at in range(math.prod(sizes))]
