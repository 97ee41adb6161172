"""Defines TPU slices and machines with NVIDIA GPUs by name, with their peak rates. Any machine can compile programs for their devices.

The peak rates of TPUs are from Google's pages (https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e, .../tpu7x). The peak rates
of GPUs are from NVIDIA's data sheets (https://www.nvidia.com/en-us/data-center/h100, .../h200, .../a100, .../l40s, and the pages on HGX B200
and RTX PRO 6000 Blackwell), without sparsity. The pages give the interconnect bandwidth as the sum of both directions, but this
module uses one direction.

`hbm_gib` of a TPU is the memory that libtpu 0.0.42 allows a program, as its error messages show: "exceeds available HBM (15.75G)". For a
GPU, it is the fraction `MEMORY_FRACTION` of the memory that the driver reports, which is a little less than the data sheet's.
"""

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
from dapo_jax.terminal import silent_libraries

MACHINE_GPUS = 8
"""Default number of GPUs per machine, if the topology's name does not contain this number. It is also the maximum."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation or GPU model. Peak rates are per JAX device, which is a chip or one of its two cores."""

    name: str
    """The chip's name in topology names, such as v5p or h100. For a TPU, this is also libtpu's name."""
    aliases: tuple[str, ...] = ()
    """Prefixes of Google Cloud's slice names, such as v5litepod in v5litepod-16."""
    counts_cores: bool = False
    """True if the number in a slice's name counts cores, two per chip, rather than chips."""
    axes: int = 2
    """Number of dimensions of the interconnect grid. GPUs form a grid of machines x GPUs per machine."""
    kind: str = ""
    """Prefix of a GPU's `device_kind` in JAX. Empty for a TPU."""
    target: str = ""
    """XLA's description of a GPU, as the text of a `GpuTargetConfigProto`. Empty for a TPU."""
    links: str = "ICI"
    """The name of the links between the devices of a slice or a machine."""
    hbm_gib: float
    device_flops: float
    """Peak rate of bfloat16 matrix products, in operations per second."""
    device_hbm_bytes_s: float
    """Memory bandwidth of one device, in bytes per second."""
    device_ici_bytes_s: float
    """Bytes per second that one device can receive over all its links together."""

    @property
    def device_hbm_bytes(self) -> int:
        """Bytes of one device's memory that programs and arrays may use."""
        return int(self.hbm_gib * 2**30)


def _gpu(
    name: str, kind: str, *, capability: tuple[int, int], cores: int, ghz: float, l2_mib: int | float, gib: float,
    tflops: int | float, gb_s: int, link_gb_s: int,
) -> Chip:  # fmt: skip
    """Returns a GPU model from its data sheet. `kind` is JAX's name, `gib` the memory reported by the driver, `link_gb_s` the link bandwidth in one direction.

    The limits of each compute capability are in the CUDA programming guide: shared memory per multiprocessor in KiB, threads per
    multiprocessor, and float32 units per multiprocessor.
    """
    shared, threads, units = {
        (8, 0): (164, 2048, 64), (8, 9): (100, 1536, 128), (9, 0): (228, 2048, 128), (10, 0): (228, 2048, 128), (12, 0): (100, 1536, 128),
    }[capability]  # fmt: skip
    major, minor = capability
    extension = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
    target = f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
          core_count: {cores}  fpus_per_core: {units}  clock_rate_ghz: {ghz}
          device_memory_size: {int(gib * 2**30)}  memory_bandwidth: {int(gb_s * 1e9)}  l2_cache_size: {int(l2_mib * 2**20)}
          shared_memory_per_block: 49152  shared_memory_per_block_optin: {(shared - 1) * 2**10}  shared_memory_per_core: {shared * 2**10}
          registers_per_core_limit: 65536  registers_per_block_limit: 65536
          threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: {threads}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        runtime_version {{ major: 12 minor: 8 }}
        device_description_str: "{kind}"
    """
    return Chip(
        name=name,
        kind=kind,
        target=target,
        links="NVLink" if link_gb_s > 64 else "PCIe",
        hbm_gib=MEMORY_FRACTION * gib,
        device_flops=tflops * 1e12,
        device_hbm_bytes_s=gb_s * 1e9,
        device_ici_bytes_s=link_gb_s * 1e9,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # Per chip: 275 TFLOP/s, 32 GB, 1228 GB/s; 6 links of 50 GB/s in each direction. libtpu describes the two cores
        # of a chip as separate devices, but on a v4 host, they are one device with twice the memory.
        Chip(name="v4", aliases=("v4",), counts_cores=True, axes=3, hbm_gib=15.25, device_flops=275e12 / 2,
             device_hbm_bytes_s=1228e9 / 2, device_ici_bytes_s=300e9 / 2),
        # Per chip: 197 TFLOP/s, 16 GB, 819 GB/s (800 GiB/s on some pages); links 400 GB/s in both directions together.
        Chip(name="v5e", aliases=("v5litepod", "v5e"), counts_cores=False, axes=2, hbm_gib=15.75, device_flops=197e12,
             device_hbm_bytes_s=819e9, device_ici_bytes_s=200e9),
        # Per chip: 459 TFLOP/s, 95 GiB, 2765 GB/s; links 1200 GB/s in both directions together.
        Chip(name="v5p", aliases=("v5p",), counts_cores=True, axes=3, hbm_gib=95.74, device_flops=459e12,
             device_hbm_bytes_s=2765e9, device_ici_bytes_s=600e9),
        # Per chip: 918 TFLOP/s, 32 GB, 1638 GB/s; links 800 GB/s in both directions together.
        Chip(name="v6e", aliases=("v6e",), counts_cores=False, axes=2, hbm_gib=31.25, device_flops=918e12,
             device_hbm_bytes_s=1638e9, device_ici_bytes_s=400e9),
        # Per chip of two devices: 2307 TFLOP/s, 192 GiB, 7380 GB/s; links 1200 GB/s in both directions together.
        Chip(name="tpu7x", aliases=(), counts_cores=True, axes=3, hbm_gib=94.75, device_flops=2307e12 / 2,
             device_hbm_bytes_s=7380e9 / 2, device_ici_bytes_s=600e9 / 2),
        # NVLink, both directions together: 900 GB/s (H100, H200), 600 GB/s (A100), 1800 GB/s (B200). The last two GPUs use PCIe Gen5 x16 and Gen4 x16.
        _gpu("h100", "NVIDIA H100 80GB HBM3", capability=(9, 0), cores=132, ghz=1.98, l2_mib=50, gib=79.1,
             tflops=989.4, gb_s=3350, link_gb_s=450),
        _gpu("h200", "NVIDIA H200", capability=(9, 0), cores=132, ghz=1.98, l2_mib=50, gib=139.8,
             tflops=989.4, gb_s=4800, link_gb_s=450),
        _gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", capability=(8, 0), cores=108, ghz=1.41, l2_mib=40, gib=79.2,
             tflops=312, gb_s=2039, link_gb_s=300),
        _gpu("b200", "NVIDIA B200", capability=(10, 0), cores=148, ghz=1.965, l2_mib=126.5, gib=178.3,
             tflops=2250, gb_s=7700, link_gb_s=900),
        _gpu("rtx6000pro", "NVIDIA RTX PRO 6000 Blackwell", capability=(12, 0), cores=188, ghz=2.617, l2_mib=128, gib=94.9,
             tflops=503.8, gb_s=1792, link_gb_s=64),
        _gpu("l40s", "NVIDIA L40S", capability=(8, 9), cores=142, ghz=2.52, l2_mib=96, gib=44.4,
             tflops=362, gb_s=864, link_gb_s=32),
    )
}  # fmt: skip

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
        each = "" if self.hosts == 1 or self.host_chips == MACHINE_GPUS else f"x{self.host_chips}"
        return f"{self.chip.name}{each}:{self.chips}"

    @property
    def chips(self) -> int:
        """Number of chips."""
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
        """Number of chips on one host."""
        return math.prod(self.host)

    @property
    def one_host(self) -> "Topology":
        """A topology with the same kind of chip and a single host."""
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


def parse(name: str) -> Topology:
    """Returns the slice or the machines with this name.

    Slices are CHIP:AxB, CHIP:AxBxC, or Google Cloud's name (v5p-256, v5litepod-64, v6e-8). GPUs are CHIP:N for N GPUs on one
    machine or on machines of 8, or CHIPxM:N on machines of M.

    Raises:
        ConfigError: there are no such devices; the message lists topologies of that chip, or the nearest names.
    """
    known = _known()
    if name in known:
        return known[name]
    counted = re.fullmatch(r"(.+?)(?:x(\d+))?:(\d+)", name)
    if counted and (chip := CHIPS.get(counted[1])) and chip.target:
        return _machines(name, chip, int(counted[2] or MACHINE_GPUS), int(counted[3]))
    if (shaped := re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", name)) and shaped[1] in CHIPS:
        made = Topology(chip=CHIPS[shaped[1]], shape=tuple(map(int, shaped[2].split("x"))))
        whole = len(made.shape) == made.chip.axes and all(made.shape) and not made.chip.target
        if whole and not any(size % block for size, block in zip(made.shape, made.host, strict=False)):
            return made
    of_chip = [text for text in known if re.split("[-:]", text)[0] == re.split("[-:]", name)[0]]
    near = ", ".join(of_chip or nearest(name, known, count=3, least=0.0))
    raise ConfigError(
        f"--topology {name!r}: no such slice or machine; the nearest names: {near} (chips: {', '.join(CHIPS)})"
    )


def _machines(name: str, chip: Chip, each: int, count: int) -> Topology:
    """Returns a topology of `count` GPUs, on one machine or on machines with `each` GPUs."""
    if not count or not 1 <= each <= MACHINE_GPUS:
        raise ConfigError(
            f"--topology {name!r}: found {count} GPUs on machines of {each}, needs at least 1 GPU and machines of 1 to {MACHINE_GPUS}; "
            f"for example, {chip.name}:{MACHINE_GPUS} or {chip.name}x4:16"
        )
    if count <= each:
        return Topology(chip=chip, shape=(1, count))
    if count % each:
        lower, higher = (Topology(chip=chip, shape=(count // each + more, each)).name for more in (0, 1))
        fits = max(size for size in range(1, MACHINE_GPUS) if count % size == 0)
        raise ConfigError(
            f"--topology {name!r}: {count} GPUs do not fill machines of {each}; write {lower}, {higher}, "
            f"or {chip.name}x{fits}:{count} for machines of {fits}"
        )
    return Topology(chip=chip, shape=(count // each, each))


def devices_of(made: Topology) -> list[jax.Device]:
    """Returns the devices of a topology as libtpu or the CUDA plugin describes them. Programs can be compiled for them, but they cannot store arrays.

    Raises:
        ConfigError: the compiler is not installed, or does not know the slice.
    """
    compilers, extra, size = ["libtpu"], "tpu", "684 MB"
    described: dict[str, Any] = {"platform": "tpu", "chips_per_host_bounds": made.host, "num_slices": 1}
    if made.chip.target:
        compilers, extra, size = ["jax_cuda12_plugin", "jax_cuda13_plugin"], "cuda-plan", "2.8 GB"
        shape = f"1x{made.hosts}x{made.host_chips}"
        described = {"platform": "cuda", "target_config": made.chip.target, "topology": shape}
    if all(importlib.util.find_spec(compiler) is None for compiler in compilers):
        raise ConfigError(
            f"--topology {made.name} compiles with {compilers[0]}, which is not installed: {how_to_install(extra)} "
            f"({size}; it needs no {made.chip.name}), or leave out --topology to compute sizes alone"
        )
    describe_only()
    # Imported here, because it loads parts of jax that no other code needs.
    from jax.experimental import topologies

    try:
        # Output of libtpu stays visible, because libtpu prints the name of an unknown flag before it exits.
        with silent_libraries() if made.chip.target else nullcontext():
            found = topologies.get_topology_desc(topology_name=made.name, **described)
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--topology {made.name}: {error}") from error
    return list(found.devices)


def here() -> Topology | None:
    """Returns the topology of this machine's GPUs, or None if it has other devices or an unknown GPU."""
    kind = jax.devices()[0].device_kind
    found = (chip for chip in CHIPS.values() if chip.kind and kind.startswith(chip.kind))
    return next((Topology(chip=chip, shape=(1, jax.local_device_count())) for chip in found), None)


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
            made = Topology(chip=chip, shape=tuple(map(int, shape.split("x"))))
            size = made.chips * (2 if chip.counts_cores else 1)
            known |= dict.fromkeys((*(f"{alias}-{size}" for alias in chip.aliases), made.name), made)
    return known
