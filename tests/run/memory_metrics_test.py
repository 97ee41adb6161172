"""Memory in each step's metrics: the process's own, and the fullest device's where its backend says."""

import numpy as np

from dapo_jax.run.end_of_step import GIB, memory_metrics


class Device:
    """What a backend says of one device's memory."""

    def __init__(self, told):
        self.told = told

    def memory_stats(self):
        return self.told


def test_the_fullest_device_counts_and_one_that_says_nothing_does_not():
    """1.5 and 2 GiB are held, at most 3 and 2.5 GiB were."""
    devices = [
        Device({"bytes_in_use": 1.5 * GIB, "peak_bytes_in_use": 3 * GIB}),
        Device({"bytes_in_use": 2 * GIB, "peak_bytes_in_use": 2.5 * GIB}),
        Device(None),
    ]
    found = memory_metrics(devices)
    assert found["memory/device_gib"] == 2.0
    assert found["memory/device_peak_gib"] == 3.0


def test_what_no_device_says_is_left_out():
    assert not {name for name in memory_metrics([Device(None), Device({})]) if "device" in name}


def test_what_the_process_holds_grows_by_what_it_is_given():
    """Half a GiB of pages that were written to; another thread may let go of some meanwhile, hence 0.4."""
    before = memory_metrics([])["memory/host_gib"]
    held = np.ones(GIB // 16)
    assert memory_metrics([])["memory/host_gib"] - before > 0.4
    assert held[-1] == 1.0


def test_where_the_system_does_not_say_the_metric_is_left_out(tmp_path):
    assert memory_metrics([], statm=tmp_path / "statm") == {}
