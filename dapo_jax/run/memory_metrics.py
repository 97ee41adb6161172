"""How much memory a run holds, as metrics of its steps: its process on the host, and its devices as far as their backend says.

A file of its own: it asks the system, and the steps that log it do not.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

GIB = 2**30

_STATM = Path("/proc/self/statm")
"""Where Linux says how many pages a process has; the second number is of those that are resident."""


def memory_metrics(devices: Sequence[Any] | None = None, *, statm: Path = _STATM) -> dict[str, float]:
    """`memory/host_gib`, `memory/device_gib` and `memory/device_peak_gib`; one that nobody knows here is left out.

    Args:
        devices: of which the fullest counts; None: those of this process. The backend of CPUs does not say.
        statm: where the system says what this process has; only Linux does.
    """
    found = {}
    if statm.is_file():
        found["memory/host_gib"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    told = [device.memory_stats() or {} for device in (jax.local_devices() if devices is None else devices)]
    for name, key in (("device_gib", "bytes_in_use"), ("device_peak_gib", "peak_bytes_in_use")):
        if known := [of_device[key] for of_device in told if key in of_device]:
            found[f"memory/{name}"] = max(known) / GIB
    return found
