"""metrics.jsonl stays valid JSON, one line per step, through kills and resumes; logs of JSON lines are written completely or not at all."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.trackers import JsonlTracker, MultiTracker, Tracker, read_metrics
from dapo_jax.trackers.json_lines import read_lines, write_lines


def write(path, steps, resume_step=None):
    tracker = JsonlTracker(path, resume_step)
    for step in steps:
        tracker.log(step, {"reward/mean": step / 10})
    tracker.close()


def steps_of(path):
    return [row["step"] for row in read_metrics(path)]


def test_one_object_a_line_with_the_step_first(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    assert isinstance(tracker, Tracker)
    tracker.log(1, {"update/loss": 0.1, "rollout/waves": 2})
    tracker.log(2, {"update/loss": np.float64(1e-300), "eval/arithmetic/avg@8": 1.0})
    tracker.close()
    assert path.read_text() == (
        '{"step": 1, "update/loss": 0.1, "rollout/waves": 2}\n'
        '{"step": 2, "update/loss": 1e-300, "eval/arithmetic/avg@8": 1.0}\n'
    )


def test_nan_and_infinity_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"nan": math.nan, "up": math.inf, "down": -math.inf, "yes": True})
    tracker.close()
    assert path.read_text() == '{"step": 1, "nan": null, "up": null, "down": null, "yes": 1}\n'
    assert read_metrics(path)[0]["nan"] is None


@pytest.mark.parametrize(("resume_step", "kept"), [(3, [1, 2, 3]), (2, [1, 2]), (-1, []), (9, [1, 2, 3, 4])])
def test_resuming_cuts_later_steps(tmp_path, resume_step, kept):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4])
    write(path, [], resume_step)
    assert steps_of(path) == kept


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path):
    write(tmp_path / "whole.jsonl", range(6))
    write(tmp_path / "cut.jsonl", range(5))
    with (tmp_path / "cut.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')
    write(tmp_path / "cut.jsonl", range(3, 6), resume_step=2)
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.jsonl", "whole.jsonl"]


def test_a_line_that_only_lost_its_line_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    write(path, [3], resume_step=2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "reward/mean": 0.3}\n'


def test_cutting_happens_at_once_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    before = path.read_bytes()

    def killed(source, target):
        assert Path(source).read_bytes() == before[: before.index(b'{"step": 2')]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            JsonlTracker(path, 1)
    assert path.read_bytes() == before


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=f"{path}, line 2 is not a line of metrics"):
        read_metrics(path)
    with pytest.raises(ValueError, match="line 2 is not a line of metrics"):
        JsonlTracker(path, 3)


def test_a_new_run_does_not_append_to_another_runs_metrics(tmp_path):
    write(tmp_path / "metrics.jsonl", [1])
    with pytest.raises(FileExistsError, match=r"metrics\.jsonl already contains .*run_dir"):
        JsonlTracker(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("step", [2, 1])
def test_a_step_is_logged_once(tmp_path, step):
    write(tmp_path / "metrics.jsonl", [1, 2])
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", 2)
    with pytest.raises(ValueError, match=f"already has step 2, got step {step}"):
        tracker.log(step, {})
    tracker.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's always-full device")
def test_a_full_disk_surfaces_with_the_path():
    tracker = JsonlTracker("/dev/full")
    with pytest.raises(OSError, match=r"metrics of step 1 \(No space left on device\): '/dev/full'"):
        tracker.log(1, {"a": 1.0})
    tracker.close()  # nothing is left to be written a second time


class Recording:
    """A tracker that records its calls and fails to close."""

    def __init__(self):
        self.events = []

    def log(self, step, metrics):
        self.events.append((step, dict(metrics)))

    def close(self):
        self.events.append("closed")
        raise OSError("disk full")


def test_several_trackers_get_everything_and_all_are_closed():
    trackers = [Recording(), Recording()]
    both = MultiTracker(trackers)
    assert isinstance(both, Tracker)
    both.log(1, {"x": 2.0})
    with pytest.raises(OSError, match="disk full"):
        both.close()
    assert [each.events for each in trackers] == [[(1, {"x": 2.0}), "closed"]] * 2


def fruits(path):
    return read_lines(path, what="a fruit", needs="seeds")


def test_rows_come_back_in_their_order_and_a_number_that_json_lacks_leaves_them(tmp_path):
    rows = [{"seeds": 4}, {"seeds": None}]
    path = tmp_path / "new" / "fruits.jsonl"
    write_lines(path, rows, what="fruits")
    assert fruits(path) == rows
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_lines(path, [{"seeds": float("nan")}], what="fruits")
    assert fruits(path) == rows
    assert [file.name for file in path.parent.iterdir()] == ["fruits.jsonl"]  # no temporary file stays


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"legs": 4}', r"is not a fruit \(KeyError\('seeds'\)\)"),
        ("[1]", "is not a fruit"),
        ('{"see', "is not a fruit"),
    ],
)
def test_a_line_that_is_not_such_a_row_is_named(tmp_path, line, message):
    path = tmp_path / "fruits.jsonl"
    write_lines(path, [{"seeds": 4}], what="fruits")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=rf"fruits\.jsonl, line 2 {message}"):
        fruits(path)
