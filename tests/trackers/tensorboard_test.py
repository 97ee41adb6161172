"""TensorBoard event files contain the logged metrics."""

import math
import os
import struct

import pytest

from dapo_jax.trackers import TensorBoardTracker, Tracker


def events(folder):
    """Every event, read by the record format: length, its checksum, data, its checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data, position = path.read_bytes(), 0
        while position < len(data):
            (size,) = struct.unpack_from("<Q", data, position)
            found.append(event_pb2.Event.FromString(data[position + 12 : position + 12 + size]))
            position += 12 + size + 4
    return found


def test_scalars_are_on_file_after_log(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorBoardTracker(tmp_path)
    assert isinstance(tracker, Tracker)
    tracker.log(3, {"eval/arithmetic/avg@8": 0.5, "rollout/waves": 2, "policy/entropy": math.nan})
    found = {
        value.tag: (event.step, value.simple_value)
        for event in events(tmp_path)
        for value in event.summary.value
    }
    tracker.close()
    tracker.close()
    assert found == {"eval/arithmetic/avg@8": (3, 0.5), "rollout/waves": (3, 2.0)}  # nan is a gap


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's always-full device")
def test_a_full_disk_surfaces_with_the_folder(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = TensorBoardTracker(tmp_path)
    tracker.close()
    with open("/dev/full", "wb", buffering=0) as full:
        tracker._writer._py_recordio_writer._writer = full
        for step in (1, 2):  # the error repeats, and nothing hangs
            with pytest.raises(OSError, match=f"No space left on device.*{tmp_path}"):
                tracker.log(step, {"reward/mean": 0.5})


def test_resuming_within_the_same_second_overwrites_nothing_and_drops_later_steps(tmp_path):
    pytest.importorskip("tensorboardX")
    for resume_step in (None, 4):
        tracker = TensorBoardTracker(tmp_path, resume_step)
        tracker.log(5, {"reward/mean": 0.5})
        tracker.close()
    start = 1  # SessionLog.START: TensorBoard discards the steps of earlier files from this one on
    assert [event.step for event in events(tmp_path) if event.session_log.status == start] == [5]
    assert [event.step for event in events(tmp_path) if event.summary.value] == [5, 5]
