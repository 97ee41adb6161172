"""The variables by which libtpu looks for no TPU. It reads them when it is loaded. Imports no jax."""

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
"""Values that describe a slice to libtpu, so that it asks no metadata server."""

_DEVICES = ("accel*", "vfio/[0-9]*")
"""Files in /dev, one for each chip of a TPU."""


def keep_quiet() -> None:
    """Keeps libtpu, where it is installed, from printing that this machine has no TPU; to be called before jax is imported.

    Where there is one, or the environment names platforms or a TPU, nothing is changed.
    """
    asked = bool(os.environ.get("JAX_PLATFORMS")) or any(name in os.environ for name in WITHOUT_TPU)
    there = any(next(Path("/dev").glob(pattern), None) for pattern in _DEVICES)
    if not asked and not there and importlib.util.find_spec("libtpu") is not None:
        os.environ.update(WITHOUT_TPU)
