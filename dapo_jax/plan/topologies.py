"""TPU slices by name, and their devices as libtpu describes them: enough to compile for, on any machine."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass

import jax

from dapo_jax.config import ConfigError
from dapo_jax.extras import how_to_install
from dapo_jax.nearest import nearest
from dapo_jax.parallel.libtpu import WITHOUT_TPU
from dapo_jax.plan.chips import CHIPS, Chip

_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
_SHAPES = {2: _SQUARES, 3: _CUBES}
"""The shapes of Google's pages, smallest first: a slice that is named by its size alone has one of these."""


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
        """How many there are."""
        return math.prod(self.shape)

    @property
    def host(self) -> tuple[int, int, int]:
        """The chips of one host. Flat slices of up to 8 chips are on one machine, larger ones and cubes have 4 to a machine."""
        small = self.chip.axes == 2 and self.chips <= 8
        return (self.shape[0], self.shape[1], 1) if small else (2, 2, 1)

    @property
    def one_host(self) -> "Slice":
        """A slice of one of its machines."""
        return Slice(chip=self.chip, shape=self.host[: self.chip.axes])

    @property
    def hosts(self) -> int:
        """How many machines, each with a process of the run."""
        return self.chips // math.prod(self.host)


def parse(name: str) -> Slice:
    """The slice called `name`: CHIP:AxB or CHIP:AxBxC, or by size as on Google Cloud (v5p-256, v4-8, v5litepod-64, v6e-8).

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    shaped = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", name)
    if shaped and shaped[1] in CHIPS:
        chip, shape = CHIPS[shaped[1]], tuple(int(size) for size in shaped[2].split("x"))
        made = Slice(chip=chip, shape=shape)
        if len(shape) == chip.axes and all(shape) and not any(map(lambda a, b: a % b, shape, made.host)):
            return made
        raise ConfigError(_unknown(name, chip, math.prod(shape)))
    sized = re.fullmatch(r"([a-z0-9]+)-(\d+)", name)
    chip = next((chip for chip in CHIPS.values() if sized and sized[1] in chip.aliases), None)
    if sized is None or chip is None:
        raise ConfigError(_unknown(name, None, 0))
    number = int(sized[2])
    found = [made for made in _slices(chip) if _size(made) == number]
    if not found:
        raise ConfigError(_unknown(name, chip, number // 2 if chip.counts_cores else number))
    return found[0]


def devices_of(made: Slice) -> list[jax.Device]:
    """The devices of a slice. They can be compiled for, and hold nothing.

    Raises:
        ConfigError: libtpu is not installed, or knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology compiles for TPUs with libtpu, which is not installed: {how_to_install('tpu')} "
            "(684 MB; it needs no TPU), or leave --topology out for sizes alone"
        )
    describe_only()
    # Its import loads parts of jax that nothing else needs.
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            topology_name=made.name, platform="tpu", chips_per_host_bounds=made.host, num_slices=1
        )
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(f"--topology {made.name}: {error}") from error
    return list(described.devices)


def describe_only() -> None:
    """Makes this process one that uses the CPU and only compiles for TPUs; to be called before JAX has looked for devices."""
    os.environ.update(WITHOUT_TPU)
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")


def _slices(chip: Chip) -> list[Slice]:
    return [Slice(chip=chip, shape=tuple(map(int, text.split("x")))) for text in _SHAPES[chip.axes]]


def _size(made: Slice) -> int:
    """The number in the name by size."""
    return made.chips * (2 if made.chip.counts_cores else 1)


def _unknown(name: str, chip: Chip | None, chips: int) -> str:
    """The message for a name that no slice has: with the nearest in size, or in spelling."""
    if chip is not None:
        near = sorted(_slices(chip), key=lambda made: (abs(made.chips - chips), made.chips))[:2]
        told = " or ".join(" = ".join(_names(made)) for made in sorted(near, key=lambda made: made.chips))
        return f"--topology {name!r}: no such slice of {chip.name}; the nearest in size: {told}"
    names = [text for known in CHIPS.values() for made in _slices(known) for text in _names(made)]
    near_names = nearest(name, names, count=3, least=0.0)
    return (
        f"--topology {name!r}: no such slice; the nearest names: {', '.join(near_names)} "
        f"(chips: {', '.join(CHIPS)}; CHIP:AxB or CHIP:AxBxC, or CHIP-SIZE)"
    )


def _names(made: Slice) -> list[str]:
    return [*(f"{alias}-{_size(made)}" for alias in made.chip.aliases[:1]), made.name]
