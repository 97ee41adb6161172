"""Checks the machine: installed packages, devices, host memory and the compilation cache."""

import os
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import jax

from dapo_jax.doctor.check import Found
from dapo_jax.doctor.subject import Subject
from dapo_jax.parallel import gpu_settings
from dapo_jax.parallel.device_memory import device_bytes
from dapo_jax.plan import topologies
from dapo_jax.run import records
from dapo_jax.run.disk_space import SPARE, gib
from dapo_jax.run.run_dir import checked_folder
from dapo_jax.storage import in_bucket

PACKAGES = (
    *("dapo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"),
    *("aiohttp", "gcsfs", "gguf", "google-jetstream"),
    *("huggingface_hub", "math-verify", "reasoning_gym", "tensorboardX", "wandb"),
)
"""The packages that training needs, followed by optional packages that the extras install."""

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_PLUGINS = {"jax_cuda12_plugin": "cuda", "jax_cuda13_plugin": "cuda", "libtpu": "tpu"}
"""Maps Python packages to the JAX platforms that they provide."""


def versions() -> Found:
    """Lists the versions of Python and of installed packages, and the missing packages."""
    installed, missing = [f"Python {platform.python_version()}"], list[str]()
    for package in PACKAGES:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    return Found(", ".join(installed) + (f"; not installed: {', '.join(missing)}" if missing else ""))


def devices() -> Found:
    """Reports the kind, number and memory of the devices, and warns if an accelerator seems to be unused."""
    present = jax.devices()
    limit = device_bytes(present[0])
    kinds = Counter(device.device_kind for device in present)
    message = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if limit is not None:
        message += f", {gib(limit)} each"
    elif len(present) > 1 and present[0].platform == "cpu":
        message += ", which share the host's memory"
    if (gpus := topologies.here()) is not None:
        message += f" (`dapo-jax plan --topology {gpus.name}`)"
    why, fix = _unused_accelerator() if present[0].platform == "cpu" else ("", "")
    return Found(f"{message}; {why}", "warning", fix) if why else Found(message)


def _unused_accelerator() -> tuple[str, str]:
    """Returns why an accelerator seems to be unused and the suggested fix, or two empty strings if no accelerator seems to be unused."""
    plugins = [name for name in _PLUGINS if find_spec(name)]
    asked = os.environ.get("JAX_PLATFORMS", "")
    if plugins and asked and not {"tpu", "cuda", "gpu"} & set(asked.split(",")):
        return (
            f"JAX_PLATFORMS={asked} keeps JAX from using {', '.join(plugins)}",
            "to use an accelerator, unset it",
        )
    if plugins:
        return (
            f"{', '.join(plugins)} is installed, but JAX sees only CPUs",
            f"if this machine has an accelerator, start with JAX_PLATFORMS={_PLUGINS[plugins[0]]},cpu, which reports why it cannot be "
            "used; otherwise ignore this",
        )
    why, _, fix = gpu_settings.unused().partition(": ")
    return why, fix


def settings() -> Found:
    """Lists the environment variables that configure JAX's devices, including the variables that the command line sets for GPUs."""
    values = gpu_settings.in_effect()
    return Found(", ".join(f"{name}={value}" for name, value in values.items()) or "the defaults of JAX")


def host_memory() -> Found:
    """Reports the host's total and available memory."""
    total, available = host_bytes()
    message = f"{gib(available)} available of {gib(total)}"
    if available < 2 * SPARE:
        return Found(message, "warning", "close other programs: loading JAX and a small model takes 2 GiB")
    return Found(message)


def host_bytes() -> tuple[int, int]:
    """Returns the host's total and available memory in bytes, capped at the container's memory limit (Linux, cgroup v2).

    Like MemAvailable of /proc/meminfo, it counts cached files of the container as available, because the kernel drops them when memory is needed.
    """
    total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used, kinds = (_CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and (most := limit.read_text().strip()).isdecimal():
        sizes = dict(line.split() for line in kinds.read_text().splitlines())
        cached = int(sizes["inactive_file"]) + int(sizes["active_file"])
        total, available = min(total, int(most)), min(available, int(most) - int(used.read_text()) + cached)
    return total, available


def compilation_cache(subject: Subject) -> Found:
    """Checks that compiled programs can be cached, and enables the cache for the following checks."""
    folder = records.compilation_cache()
    if not folder:
        return Found("disabled: JAX_COMPILATION_CACHE_DIR is empty, so every start compiles all programs")
    if not in_bucket(folder):
        checked_folder(folder, key="JAX_COMPILATION_CACHE_DIR", write=True)
    records.use_compilation_cache()
    return Found(f"{folder} is writable")
