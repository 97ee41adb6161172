"""The machine: what is installed, its devices, its memory, its disks."""

import importlib.util
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import jax

from dapo_jax.doctor.check import Found
from dapo_jax.extras import how_to_install
from dapo_jax.parallel.device_memory import device_bytes
from dapo_jax.run.disk_space import SPARE, gib, nearest, room_for
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.storage import AnyPath, in_bucket, path_of

PACKAGES = ("dapo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")

EXTRAS = {
    "jetstream": "jetstream",
    "http": "aiohttp",
    "gcs": "gcsfs",
    "hub": "huggingface_hub",
    "gguf": "gguf",
    "reasoning-gym": "reasoning_gym",
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
}
"""Extra of the package -> a module that it brings."""

_PLUGINS = {"libtpu": "tpu", "jax-cuda12-plugin": "gpu", "jax-cuda13-plugin": "gpu"}
"""Distribution -> the devices that it is for."""

_NVIDIA = Path("/proc/driver/nvidia/version")
"""There where a driver of NVIDIA is loaded."""


def versions() -> Found:
    """The versions of Python and of what trains."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return Found(message=", ".join(found))


def extras() -> Found:
    """Which of the package's extras are there."""
    there = [name for name, module in EXTRAS.items() if importlib.util.find_spec(module) is not None]
    missing = [name for name in EXTRAS if name not in there]
    said = ", ".join(there) or "none"
    if missing:
        said += f"; not installed: {', '.join(missing)} ({how_to_install('NAME')})"
    return Found(message=said)


def devices() -> Found:
    """Kind, number and memory; a warning where there should be others."""
    here = jax.devices()
    kinds = Counter(device.device_kind for device in here)
    limit = device_bytes(here[0])
    memory = f", {gib(limit)} each" if limit is not None else ", which share the host's memory"
    said = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + (
        memory if len(here) > 1 or limit else ""
    )
    if here[0].platform != "cpu":
        return Found(message=said)
    missed, remedy = _missed()
    return (
        Found(message=f"{said}; {missed}", state="warning", remedy=remedy) if missed else Found(message=said)
    )


def _missed() -> tuple[str, str]:
    """The sign of an accelerator although JAX shows only CPUs, and the remedy; empty if nothing does."""
    names = {distribution.metadata["Name"].lower() for distribution in distributions()}
    plugins = sorted(name for name in _PLUGINS if name in names)
    asked = os.environ.get("JAX_PLATFORMS", "")
    if plugins and asked and not {"tpu", "cuda", "gpu"} & set(asked.split(",")):
        return (
            f"JAX_PLATFORMS={asked} keeps JAX from using {', '.join(plugins)}",
            "to use an accelerator, unset it",
        )
    if plugins:
        wanted = "tpu" if _PLUGINS[plugins[0]] == "tpu" else "cuda"
        return (
            f"{', '.join(plugins)} is installed, but JAX sees only CPUs",
            f"if an accelerator is here, start with JAX_PLATFORMS={wanted},cpu, which says why it cannot be used; if not, this is as "
            "it should be",
        )
    if _NVIDIA.exists():
        return "there is a driver of NVIDIA, but no plugin of JAX for it", how_to_install("cuda")
    return "", ""


def host_memory() -> Found:
    """Total, and what is available now."""
    total, available = host_bytes()
    said = f"{gib(available)} available of {gib(total)}"
    if available < 2 * SPARE:
        return Found(
            message=said,
            state="warning",
            remedy="end other programs: loading JAX and a small model takes 2 GiB",
        )
    return Found(message=said)


def host_bytes() -> tuple[int, int]:
    """The host's memory, and what of it can be had; in a container, what the container may take (Linux, cgroup 2)."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = total
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (most := limit.read_text().strip()).isdecimal():
        total = min(total, int(most))
        available = min(available, int(most) - int(used.read_text()))
    return total, available


def disk(places: Mapping[str, tuple[str, int]]) -> Found:
    """Free space where things are written; see `room_for`."""
    room = room_for(places)
    return Found(message=room.message, state=room.state, remedy=room.remedy)


def compilation_cache(folder: str) -> Found:
    """Whether compiled programs can be kept; from here on they are."""
    if not folder:
        return Found(message="none: compilation_cache is empty, and every start compiles anew")
    place = path_of(folder)
    if not in_bucket(folder) and (why := not_writable(place)):
        return Found(
            state="failed",
            message=f"{place}: {why}",
            remedy="set compilation_cache to a folder that can be written to, or to ''",
        )
    use_compilation_cache(folder)
    return Found(message=f"{folder} can be written to")


def not_writable(folder: AnyPath) -> str:
    """Why nothing can be written in a local folder, or in the nearest above it that is there; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=nearest(folder)):
            return ""
    except OSError as error:
        return str(error)
