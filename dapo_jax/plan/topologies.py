"""Defines TPU slices and machines with NVIDIA GPUs by name. Any machine can compile programs for their devices."""

import importlib.util
import math
import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from dapo_jax.config import ConfigError
from dapo_jax.hints import how_to_install, nearest
from dapo_jax.parallel.device_memory import device_bytes
from dapo_jax.parallel.gpu_settings import MEMORY_FRACTION
from dapo_jax.parallel.libtpu import WITHOUT_TPU
from dapo_jax.plan.chips import CHIPS, Chip
from dapo_jax.terminal import silent_libraries

MACHINE_GPUS = 8
"""Default number of GPUs per machine, if the topology's name does not contain this number. It is also the maximum."""


_SHAPES = {
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
}
"""The slice shapes on Google's pages by number of axes, smallest first. A name with a size, such as v5p-256, refers to one of these shapes."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The devices of a run: a TPU slice, or machines with NVIDIA GPUs."""

    chip: Chip
    shape: tuple[int, ...]
    """The grid of chips. For GPUs, the number of machines and the number of GPUs in each."""
    network_bytes_s: float = 50e9
    """Bytes per second that one GPU can receive from other machines. The default is 400 Gbit/s, as in DGX H100. This is not used for TPU slices."""

    @property
    def name(self) -> str:
        """The name that `parse` accepts, such as v5p:4x4x8, h100:64 for machines of 8 GPUs, or h100x4:16 for machines of 4."""
        if not self.chip.target:
            return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        suffix = "" if self.hosts == 1 or self.host_chips == MACHINE_GPUS else f"x{self.host_chips}"
        return f"{self.chip.name}{suffix}:{self.chips}"

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def host(self) -> tuple[int, int, int]:
        """The grid of chips on one host. A 2D slice of up to 8 chips is a single host; all other TPU hosts have 4 chips."""
        if self.chip.target:
            return (1, self.shape[1], 1)
        small = self.chip.axes == 2 and self.chips <= 8
        return (self.shape[0], self.shape[1], 1) if small else (2, 2, 1)

    @property
    def host_chips(self) -> int:
        return math.prod(self.host)

    @property
    def one_host(self) -> "Topology":
        return Topology(chip=self.chip, shape=self.host[: self.chip.axes])

    @property
    def hosts(self) -> int:
        """Number of hosts, each with one process of the run."""
        return self.chips // self.host_chips

    @property
    def has_network(self) -> bool:
        """Whether some devices are connected only by a network, as with GPUs on several machines. The links of a TPU slice connect all hosts."""
        return bool(self.chip.target) and self.hosts > 1

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions about the devices, as text."""
        memory = f"JAX allocates {MEMORY_FRACTION:.0%} of a GPU's memory (XLA_CLIENT_MEM_FRACTION={MEMORY_FRACTION})"
        network = f"each GPU receives {self.network_bytes_s / 125e6:g} Gbit/s from other machines (--network)"
        return (*[memory] * bool(self.chip.target), *[network] * self.has_network)


def parse(name: str, *, option: str = "--topology") -> Topology:
    """Returns the slice or the machines with this name.

    Slices are CHIP:AxB, CHIP:AxBxC, or Google Cloud's name (v5p-256, v5litepod-64, v6e-8). GPUs are CHIP:N for N GPUs on one
    machine or on machines of 8, or CHIPxM:N on machines of M. Raises ConfigError if there are no such devices; the message lists topologies of that chip, or
    the nearest names.
    """
    known = _known()
    if name in known:
        return known[name]
    counted = re.fullmatch(r"(.+?)(?:x(\d+))?:(\d+)", name)
    if counted and (chip := CHIPS.get(counted[1])) and chip.target:
        return _machines(f"{option} {name!r}", chip, int(counted[2] or MACHINE_GPUS), int(counted[3]))
    if (shaped := re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", name)) and shaped[1] in CHIPS:
        topology = Topology(chip=CHIPS[shaped[1]], shape=tuple(map(int, shaped[2].split("x"))))
        whole = len(topology.shape) == topology.chip.axes and all(topology.shape) and not topology.chip.target
        if whole and not any(
            size % block for size, block in zip(topology.shape, topology.host, strict=False)
        ):
            return topology
    of_chip = [text for text in known if re.split("[-:]", text)[0] == re.split("[-:]", name)[0]]
    similar = ", ".join(of_chip or nearest(name, known, count=3, least=0.0))
    raise ConfigError(
        f"{option} {name!r}: no such slice or machine; the nearest names: {similar} (chips: {', '.join(CHIPS)})"
    )


def _machines(given: str, chip: Chip, per_machine: int, count: int) -> Topology:
    """Returns a topology of `count` GPUs, on one machine or on machines with `per_machine` GPUs."""
    if not count or not 1 <= per_machine <= MACHINE_GPUS:
        raise ConfigError(
            f"{given}: found {count} GPUs on machines of {per_machine}, needs at least 1 GPU and machines of 1 to {MACHINE_GPUS}; "
            f"for example, {chip.name}:{MACHINE_GPUS} or {chip.name}x4:16"
        )
    if count <= per_machine:
        return Topology(chip=chip, shape=(1, count))
    if count % per_machine:
        lower, higher = (
            Topology(chip=chip, shape=(count // per_machine + more, per_machine)).name for more in (0, 1)
        )
        fits = max(size for size in range(1, MACHINE_GPUS) if count % size == 0)
        raise ConfigError(
            f"{given}: {count} GPUs do not fill machines of {per_machine}; write {lower}, {higher}, "
            f"or {chip.name}x{fits}:{count} for machines of {fits}"
        )
    return Topology(chip=chip, shape=(count // per_machine, per_machine))


def devices_of(topology: Topology) -> list[jax.Device]:
    """Returns the devices of a topology as libtpu or the CUDA plugin describes them. Programs can be compiled for them, but they cannot store arrays. Raises
    ConfigError if the compiler is not installed, or does not know the slice."""
    compilers, extra, size = ["libtpu"], "tpu", "684 MB"
    described: dict[str, Any] = {"platform": "tpu", "chips_per_host_bounds": topology.host, "num_slices": 1}
    if topology.chip.target:
        compilers, extra, size = ["jax_cuda12_plugin", "jax_cuda13_plugin"], "cuda-plan", "2.8 GB"
        shape = f"1x{topology.hosts}x{topology.host_chips}"
        described = {"platform": "cuda", "target_config": topology.chip.target, "topology": shape}
    if all(importlib.util.find_spec(compiler) is None for compiler in compilers):
        raise ConfigError(
            f"--topology {topology.name} compiles with {compilers[0]}, which is not installed: {how_to_install(extra)} "
            f"({size}; it needs no {topology.chip.name}), or leave out --topology to compute sizes alone"
        )
    describe_only()
    # Imported here, because it loads parts of jax that no other code needs.
    from jax.experimental import topologies

    try:
        # Output of libtpu stays visible, because libtpu prints the name of an unknown flag before it exits.
        with silent_libraries() if topology.chip.target else nullcontext():
            description = topologies.get_topology_desc(topology_name=topology.name, **described)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--topology {topology.name}: {error}") from error
    return list(description.devices)


def here() -> Topology | None:
    """Returns the topology of this machine's GPUs, or None if it has other devices, an unknown GPU, or parts of GPUs (MIG)."""
    kind = jax.devices()[0].device_kind
    # NVIDIA H200 MIG 1g.18gb is an eighth of a card, and NVIDIA H200 NVL is slower.
    other = re.search(r"\b(MIG|NVL)\b", kind)
    known = (chip for chip in CHIPS.values() if chip.kind and kind.startswith(chip.kind) and not other)
    return next((Topology(chip=chip, shape=(1, jax.local_device_count())) for chip in known), None)


def present_bytes() -> int | None:
    """Returns the bytes that programs may use on one of this machine's devices, or None for a CPU and for an unknown GPU that reports no limit."""
    reported = device_bytes(jax.devices()[0])
    # With XLA_PYTHON_CLIENT_ALLOCATOR=platform, a GPU reports no limit.
    return gpus.chip.device_hbm_bytes if reported is None and (gpus := here()) is not None else reported


def describe_only() -> None:
    """Restricts this process to the CPU and to compiling for other devices. It must be called before JAX initializes its devices."""
    os.environ.update(WITHOUT_TPU)
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def _known() -> dict[str, Topology]:
    """Maps each topology name to the topology: the slices on Google's pages, and common numbers of GPUs, smallest first."""
    known: dict[str, Topology] = {}
    for chip in CHIPS.values():
        if chip.target:
            for count in (1, 2, 4, 8, 16, 32, 64):
                known[f"{chip.name}:{count}"] = _machines("", chip, MACHINE_GPUS, count)
            continue
        for shape in _SHAPES[chip.axes].split():
            topology = Topology(chip=chip, shape=tuple(map(int, shape.split("x"))))
            size = topology.chips * (2 if chip.counts_cores else 1)
            known |= dict.fromkeys((*(f"{alias}-{size}" for alias in chip.aliases), topology.name), topology)
    return known
