"""Environment variables that keep libtpu from searching for a TPU when it is loaded. This module does not import jax."""

import importlib.util
import os
from pathlib import Path

WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables that describe a fictitious TPU slice, so that libtpu does not query a metadata server."""

_DEVICES = ("accel*", "vfio/[0-9]*")
"""Glob patterns of TPU device files in /dev."""


def keep_quiet() -> None:
    """Keeps an installed libtpu from printing that this machine has no TPU. Call this before jax is imported.

    This has no effect if the machine has a TPU, or if JAX_PLATFORMS or a variable in `WITHOUT_TPU` is already set.
    """
    asked = bool(os.environ.get("JAX_PLATFORMS")) or any(name in os.environ for name in WITHOUT_TPU)
    there = any(next(Path("/dev").glob(pattern), None) for pattern in _DEVICES)
    if not asked and not there and importlib.util.find_spec("libtpu") is not None:
        os.environ.update(WITHOUT_TPU)
