"""Metrics in a bucket, where nothing can be appended to: the same lines, and requests that do not grow with the run."""

import json
import os

import pytest

from dapo_jax.trackers import JsonlTracker, read_metrics
from dapo_jax.trackers.json_lines import LINES_PER_OBJECT
from tests.trackers.json_lines_test import steps_of, write

PATH = "gs://bucket/run/metrics.jsonl"


def objects(bucket):
    return {name.removeprefix("gs://bucket/run/"): data for name, data in bucket.files("gs://bucket").items()}


def test_the_lines_equal_a_files(bucket, tmp_path):
    steps = range(2 * LINES_PER_OBJECT + 3)
    write(PATH, steps)
    write(tmp_path / "metrics.jsonl", steps)
    found = objects(bucket)
    assert list(found) == ["metrics/000000.jsonl", "metrics/000032.jsonl", "metrics/000064.jsonl"]
    assert b"".join(found.values()) == (tmp_path / "metrics.jsonl").read_bytes()
    assert read_metrics(PATH) == read_metrics(tmp_path / "metrics.jsonl")


def test_a_step_is_stored_before_log_returns_by_one_request(bucket):
    """Neither the number nor the size of requests grows with earlier steps."""
    tracker = JsonlTracker(PATH)
    for step in range(LINES_PER_OBJECT + 2):
        before = len(bucket.requests)
        tracker.log(step, {"a": 1.0})
        assert [method for method, _, _ in bucket.requests[before:]] == ["POST"]
        last = list(objects(bucket).values())[-1].splitlines()[-1]
        assert json.loads(last)["step"] == step
    assert max(data.count(b"\n") for data in objects(bucket).values()) == LINES_PER_OBJECT


def test_a_line_that_cannot_be_stored_is_an_error_and_may_be_logged_again(bucket):
    tracker = JsonlTracker(PATH)
    tracker.log(1, {"a": 1.0})
    permitted, bucket.granted = bucket.granted, set()
    with pytest.raises(OSError, match=r"cannot write the metrics of step 2 \(.*objects\.create"):
        tracker.log(2, {"a": 1.0})
    bucket.granted = permitted
    assert steps_of(PATH) == [1]
    tracker.log(2, {"a": 1.0})
    assert steps_of(PATH) == [1, 2]


@pytest.mark.parametrize(
    ("resume_step", "names"),
    [
        (-1, []),
        (5, ["metrics/000000.jsonl"]),
        (LINES_PER_OBJECT - 1, ["metrics/000000.jsonl"]),
        (LINES_PER_OBJECT, ["metrics/000000.jsonl", "metrics/000032.jsonl"]),
        (99, ["metrics/000000.jsonl", "metrics/000032.jsonl"]),
    ],
)
def test_resuming_cuts_later_steps_and_continues(bucket, resume_step, names):
    last = LINES_PER_OBJECT + 1
    write(PATH, range(last + 1))
    write(PATH, [], resume_step)
    kept = list(range(min(resume_step, last) + 1))
    assert list(objects(bucket)) == names
    assert (steps_of(PATH) if names else []) == kept
    write(PATH, range(len(kept), last + 3), resume_step)
    assert steps_of(PATH) == list(range(last + 3))


def test_a_run_copied_from_a_disk_continues_in_a_bucket(bucket, tmp_path):
    write(tmp_path / "metrics.jsonl", [1, 2, 3])
    bucket.buckets["bucket"]["run/metrics.jsonl"] = ((tmp_path / "metrics.jsonl").read_bytes(), 1)
    write(PATH, [3, 4], resume_step=2)
    assert list(objects(bucket)) == ["metrics.jsonl", "metrics/000003.jsonl"]
    assert steps_of(PATH) == [1, 2, 3, 4]
    write(PATH, [], resume_step=1)
    assert steps_of(PATH) == [1]


def test_a_run_copied_from_a_bucket_continues_on_a_disk(bucket, tmp_path):
    """The file's lines are then later than the lines in the folder."""
    write(PATH, [1, 2, 3])
    os.makedirs(tmp_path / "metrics")
    (tmp_path / "metrics" / "000001.jsonl").write_bytes(objects(bucket)["metrics/000001.jsonl"])
    write(tmp_path / "metrics.jsonl", [3, 4], resume_step=2)
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    write(tmp_path / "metrics.jsonl", [], resume_step=3)
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
