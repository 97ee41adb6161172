"""Defines TPU slices by name, with their chips and with the devices that libtpu describes. Any machine can compile programs for these devices.

The roofline's peak rates are from Google's pages (https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e, .../tpu7x). The
pages add up the interconnect bandwidth of both directions, but this module uses one direction. `hbm_gib` is the memory
that libtpu 0.0.42 allows a program, as its error messages show: "exceeds available HBM (15.75G)".
"""

import importlib.util
import math
import os
import re
from dataclasses import dataclass

import jax

from dapo_jax.config import ConfigError
from dapo_jax.hints import how_to_install, nearest
from dapo_jax.parallel.libtpu import WITHOUT_TPU


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU generation. Peak rates are per JAX device, which is a chip or one of its two cores."""

    name: str
    """The name in libtpu's topologies."""
    aliases: tuple[str, ...]
    """Prefixes of Google Cloud's slice names, such as v5litepod in v5litepod-16."""
    counts_cores: bool
    """True if the number in a slice's name counts cores, two per chip, rather than chips."""
    axes: int
    """Number of dimensions of the interconnect grid."""
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


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # 275 TFLOP/s, 32 GB, 1228 GB/s; 6 links of 50 GB/s each way. libtpu describes the two cores as separate devices;
        # on a v4 host they are one device with twice the memory.
        Chip(name="v4", aliases=("v4",), counts_cores=True, axes=3, hbm_gib=15.25, device_flops=275e12 / 2,
             device_hbm_bytes_s=1228e9 / 2, device_ici_bytes_s=300e9 / 2),
        # 197 TFLOP/s, 16 GB, 819 GB/s (800 GiB/s on some pages), 400 GB/s both ways.
        Chip(name="v5e", aliases=("v5litepod", "v5e"), counts_cores=False, axes=2, hbm_gib=15.75, device_flops=197e12,
             device_hbm_bytes_s=819e9, device_ici_bytes_s=200e9),
        # 459 TFLOP/s, 95 GiB, 2765 GB/s, 1200 GB/s both ways.
        Chip(name="v5p", aliases=("v5p",), counts_cores=True, axes=3, hbm_gib=95.74, device_flops=459e12,
             device_hbm_bytes_s=2765e9, device_ici_bytes_s=600e9),
        # 918 TFLOP/s, 32 GB, 1638 GB/s, 800 GB/s both ways.
        Chip(name="v6e", aliases=("v6e",), counts_cores=False, axes=2, hbm_gib=31.25, device_flops=918e12,
             device_hbm_bytes_s=1638e9, device_ici_bytes_s=400e9),
        # 2307 TFLOP/s, 192 GiB, 7380 GB/s, 1200 GB/s both ways; two devices per chip.
        Chip(name="tpu7x", aliases=(), counts_cores=True, axes=3, hbm_gib=94.75, device_flops=2307e12 / 2,
             device_hbm_bytes_s=7380e9 / 2, device_ici_bytes_s=600e9 / 2),
    )
}  # fmt: skip

_SHAPES = {
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16",
}
"""The slice shapes on Google's pages by number of axes, smallest first. A name with a size, such as v5p-256, refers to one of these shapes."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A TPU slice."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name that libtpu uses, such as v5p:4x4x8."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    @property
    def host(self) -> tuple[int, int, int]:
        """The grid of chips on one host. A 2D slice of up to 8 chips is a single host; all other hosts have 4 chips."""
        small = self.chip.axes == 2 and self.chips <= 8
        return (self.shape[0], self.shape[1], 1) if small else (2, 2, 1)

    @property
    def one_host(self) -> "Slice":
        """A slice with the same kind of chip and a single host."""
        return Slice(chip=self.chip, shape=self.host[: self.chip.axes])

    @property
    def hosts(self) -> int:
        """Number of hosts, each with one process of the run."""
        return self.chips // math.prod(self.host)


def parse(name: str) -> Slice:
    """Returns the slice with this name: CHIP:AxB, CHIP:AxBxC, or Google Cloud's name (v5p-256, v5litepod-64, v6e-8).

    Raises:
        ConfigError: there is no such slice; the message lists the slices of that chip, or the nearest names.
    """
    known = _known_slices()
    if name in known:
        return known[name]
    if (shaped := re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", name)) and shaped[1] in CHIPS:
        made = Slice(chip=CHIPS[shaped[1]], shape=tuple(map(int, shaped[2].split("x"))))
        whole = len(made.shape) == made.chip.axes and all(made.shape)
        if whole and not any(size % block for size, block in zip(made.shape, made.host, strict=False)):
            return made
    of_chip = [text for text in known if re.split("[-:]", text)[0] == re.split("[-:]", name)[0]]
    near = ", ".join(of_chip or nearest(name, known, count=3, least=0.0))
    raise ConfigError(
        f"--topology {name!r}: no such slice; the nearest names: {near} (chips: {', '.join(CHIPS)})"
    )


def devices_of(made: Slice) -> list[jax.Device]:
    """Returns the devices of a slice as libtpu describes them. Programs can be compiled for them, but they cannot store arrays.

    Raises:
        ConfigError: libtpu is not installed, or does not know the slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology compiles for TPUs with libtpu, which is not installed: {how_to_install('tpu')} "
            "(684 MB; it needs no TPU), or leave out --topology to compute sizes alone"
        )
    describe_only()
    # Imported here, because it loads parts of jax that no other code needs.
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            topology_name=made.name, platform="tpu", chips_per_host_bounds=made.host, num_slices=1
        )
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--topology {made.name}: {error}") from error
    return list(described.devices)


def describe_only() -> None:
    """Restricts this process to the CPU and to compiling for TPUs. It must be called before JAX initializes its devices."""
    os.environ.update(WITHOUT_TPU)
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def _known_slices() -> dict[str, Slice]:
    """Returns the slices that Google's pages list, smallest first, under each of their names."""
    known: dict[str, Slice] = {}
    for chip in CHIPS.values():
        for shape in _SHAPES[chip.axes].split():
            made = Slice(chip=chip, shape=tuple(map(int, shape.split("x"))))
            size = made.chips * (2 if chip.counts_cores else 1)
            known |= dict.fromkeys((*(f"{alias}-{size}" for alias in chip.aliases), made.name), made)
    return known
