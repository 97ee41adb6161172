"""Metrics of memory: of the process, and of the fullest device where the backend reports it."""

import numpy as np

from dapo_jax.run.end_of_step import GIB, memory_metrics


class Device:
    """A device with the memory statistics of a backend."""

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_the_fullest_device_counts():
    devices = [
        Device({"bytes_in_use": 1.5 * GIB, "peak_bytes_in_use": 3 * GIB}),
        Device({"bytes_in_use": 2 * GIB, "peak_bytes_in_use": 2.5 * GIB}),
        Device(None),
    ]
    found = memory_metrics(devices)
    assert (found["memory/device_gib"], found["memory/device_peak_gib"]) == (2.0, 3.0)
    assert not {name for name in memory_metrics([Device(None), Device({})]) if "device" in name}


def test_the_memory_of_the_process_grows_with_an_array():
    """By half a GiB. Another thread may free some meanwhile, hence 0.4."""
    before = memory_metrics([])["memory/host_gib"]
    held = np.ones(GIB // 16)
    assert memory_metrics([])["memory/host_gib"] - before > 0.4
    assert held[-1] == 1.0
