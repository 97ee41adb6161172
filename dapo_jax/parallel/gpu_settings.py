"""Environment variables that configure JAX and XLA on NVIDIA GPUs. This module does not import jax."""

import importlib.util
import os
import re
from pathlib import Path

from dapo_jax.hints import how_to_install

MEMORY_FRACTION = 0.9
"""Fraction of a GPU's memory that JAX reserves. JAX's default is 0.75. NVIDIA's "Tips for High-Performance LLMs with JAX and XLA" use 0.9 or 0.8."""

FLAGS = {
    # Makes runs reproducible: XLA selects matmul kernels without timing them, and cuDNN's attention does not use atomic operations.
    "xla_gpu_exclude_nondeterministic_ops": "true",
    # Overlaps collectives with other kernels (see JAX's "GPU performance tips"). NVIDIA's JAX images set this flag too.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
"""XLA flags. Command buffers and NCCL keep their defaults, because XLA enables command buffers, and NVIDIA's JAX images set no NCCL variable."""

_UNMERGED = {"xla_gpu_dot_merger_threshold_mb": 0}
DECODING_OPTIONS = {**_UNMERGED, "xla_gpu_enable_triton_gemm": False}, _UNMERGED
"""XLA options of the decoding program: with weights in the compute dtype, and with 8-bit weights. XLA then does not copy matrices to join them.
cuBLAS adds products to the residual stream. For Triton, XLA splits long sums and adds the parts. cuBLAS would need a copy of 8-bit weights in 16 bits."""

_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The environment variable for the memory fraction, and its former name. jaxlib raises an error if both are set."""

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_DEVICES = Path("/dev")
_PATTERNS = ("nvidia[0-9]*", "nvidiactl", "dxg")
"""Glob patterns of NVIDIA device files. dxg is the device file in the Windows Subsystem for Linux."""


def apply() -> None:
    """Sets environment variables for the memory fraction and the XLA flags, unless they are already set. Call this before JAX initializes its devices.

    This has no effect without an NVIDIA GPU and JAX's plugin for it, or if JAX_PLATFORMS excludes GPUs.
    """
    platforms = os.environ.get("JAX_PLATFORMS")
    if (platforms and not asked()) or not _there() or missing_plugin():
        return
    if not any(name in os.environ for name in _FRACTIONS):
        os.environ[_FRACTIONS[0]] = str(MEMORY_FRACTION)
    given = os.environ.get("XLA_FLAGS", "").strip()
    if not given or given.startswith("-"):  # otherwise this is the name of a file with flags
        mine = [f"--{name}={value}" for name, value in FLAGS.items() if name not in re.findall(r"\w+", given)]
        os.environ["XLA_FLAGS"] = " ".join([*given.split(), *mine])


def unused() -> str:
    """Returns why a program on the CPU does not use an NVIDIA GPU of this machine, or the GPU in JAX_PLATFORMS, and the remedy, or an empty string."""
    if not _there() and not asked():
        return ""
    excluded = (
        f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')} excludes the NVIDIA GPU of this machine: unset it"
    )
    other = "JAX cannot use an NVIDIA GPU: start with JAX_PLATFORMS=cuda, which reports the reason"
    return missing_plugin() or (excluded if os.environ.get("JAX_PLATFORMS") and not asked() else other)


def missing_plugin() -> str:
    """Returns the command that installs JAX's plugin for NVIDIA GPUs, or an empty string if the plugin is installed."""
    there = any(map(importlib.util.find_spec, _PLUGINS))
    return "" if there else f"JAX's plugin for NVIDIA GPUs is missing: {how_to_install('cuda')}"


def asked() -> bool:
    """Returns whether JAX_PLATFORMS names NVIDIA GPUs."""
    return bool({"cuda", "gpu"} & set(os.environ.get("JAX_PLATFORMS", "").split(",")))


def _there() -> bool:
    return any(next(_DEVICES.glob(pattern), None) for pattern in _PATTERNS)


def in_effect() -> dict[str, str]:
    """Returns all environment variables that are set and that configure JAX's devices or XLA, by name."""
    names = ("JAX_PLATFORMS", "XLA_FLAGS", *_FRACTIONS, "LIBTPU_INIT_ARGS")
    return {name: os.environ[name] for name in names if os.environ.get(name)}
