"""What is said of a run: that it runs, or when and why it ended, as far as anybody can know."""

import json
import os
from datetime import UTC, datetime, timedelta

import pytest

from dapo_jax.report.run_states import state_of
from dapo_jax.report.runs import read_runs
from dapo_jax.trackers.run_status import FILE, read_status, write_status
from tests.report.made import write_run

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def run(tmp_path):
    """Five steps of five; everything was written an hour before `NOW`."""
    folder = write_run(tmp_path / "run", steps=5, tokenizer=False)
    touch(folder, NOW - timedelta(hours=1))
    return folder


def touch(folder, when):
    for path in folder.rglob("*"):
        os.utime(path, (when.timestamp(), when.timestamp()))


def state(folder, now=NOW):
    [found] = read_runs([folder])
    return state_of(folder, found.config, found.rows, now=now)


def said(folder, kind, reason="", **process):
    """A status as another machine's run left it."""
    write_status(folder, kind, reason)
    there = json.loads((folder / FILE).read_text())
    there["process"] |= {"host": "elsewhere", **process}
    (folder / FILE).write_text(json.dumps(there))
    touch(folder, NOW - timedelta(hours=1))


@pytest.mark.parametrize("kind", ["finished", "stopped", "failed"])
def test_a_run_that_said_how_it_ended_is_believed(run, kind):
    said(run, kind, "why")
    found = state(run)
    assert (found.kind, found.reason) == (kind, "why")
    assert found.at == read_status(run).at


def test_a_run_of_this_machine_runs_as_long_as_its_process_does(run):
    write_status(run, "running")
    touch(run, NOW - timedelta(days=3))
    assert state(run).kind == "running"  # this process, however long it is silent
    said(run, "running", host=read_status(run).process.host, started="another")
    found = state(run)
    assert (found.kind, found.at) == ("silent", "2026-03-01T11:00:00+00:00")


def test_a_run_elsewhere_is_silent_after_three_of_its_longest_steps(run):
    """Steps of `metrics_line` take 20.5 s, with an evaluation 50.5 s: ten minutes are more. One of an hour has three."""
    said(run, "running")
    assert state(run).kind == "silent"
    assert state(run, NOW - timedelta(minutes=51)).kind == "running"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "time/step_s": 3600.0, "time/eval_s": null}\n')
    touch(run, NOW - timedelta(hours=1))
    assert state(run).kind == "running"
    assert state(run, NOW + timedelta(hours=2, minutes=1)).kind == "silent"


def test_a_run_without_a_status_is_finished_if_its_model_and_its_last_step_are_there(run):
    assert state(run).kind == "unknown"
    (run / "model").mkdir()
    assert state(run).kind == "finished"
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("steps: 5", "steps: 6"))
    found = state(run)
    assert (found.kind, found.at[:10]) == ("unknown", "2026-03-01")


def test_a_status_of_a_later_version_is_no_error(run):
    said(run, "hibernating")
    assert state(run).kind == "unknown"
