"""Reading runs, also while they run; their state; and errors."""

import json
import os
from datetime import UTC, datetime, timedelta

import pytest

from dapo_jax.config import ConfigError, SftConfig, to_yaml
from dapo_jax.report.runs import read_runs, state_of
from dapo_jax.trackers.run_status import FILE, read_status, write_status
from tests.report.made import problem_line, write_evaluation, write_run


def test_a_current_run_is_read_up_to_its_last_whole_line_and_each_step_counts_once(tmp_path):
    """A run that was copied from a bucket and continued locally may have a step in both places."""
    run = write_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/accu')
    (run / "metrics").mkdir()
    (run / "metrics" / "000001.jsonl").write_text('{"step": 1, "rollout/accuracy": 0.125}\n')
    [found] = read_runs([run])
    assert [row["step"] for row in found.rows] == [0, 1, 2, 3]
    assert found.config.steps == 3
    assert [path.name for path in found.logged] == [f"step_{step:06d}.jsonl" for step in (1, 2, 3)]


def test_evaluations_are_found_in_the_order_of_their_steps(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    for step in (20, 3, 1_000_000):
        for name in ("b", "a"):
            write_evaluation(run, step, [problem_line(0, 1)], name=name)
    (run / "evaluations" / "step_000003" / "notes.txt").write_text("mine")
    (run / "evaluations" / "mine").mkdir()
    [found] = read_runs([run])
    assert [f"{path.parent.name}/{path.name}" for path in found.evaluations] == [
        f"step_{step}/{name}.jsonl" for step in ("000003", "000020", "1000000") for name in ("a", "b")
    ]


def test_a_run_in_a_bucket_is_read(bucket, tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    for file in run.rglob("*"):
        if file.is_file():
            name = f"here/{file.relative_to(run)}".replace("metrics.jsonl", "metrics/000000.jsonl")
            bucket.buckets["bucket"][name] = (file.read_bytes(), 1)
    [found] = read_runs(["gs://bucket/here"])
    assert [row["step"] for row in found.rows] == [0, 1, 2]
    assert [path.name for path in found.logged] == ["step_000001.jsonl", "step_000002.jsonl"]
    assert found.name == "here"


def test_names_are_as_short_as_possible(tmp_path):
    places = [tmp_path / "lr" / "seed0", tmp_path / "clip" / "seed0", tmp_path / "clip" / "seed1"]
    for place in places:
        write_run(place, steps=1)
    assert [run.name for run in read_runs(places)] == ["lr/seed0", "clip/seed0", "clip/seed1"]
    assert [run.name for run in read_runs(places[:1])] == ["seed0"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 0}\n{oops\n{"step": 1}\n', r"metrics.jsonl, line 2 is damaged"),
        ("metrics.jsonl", "", r"has no metrics yet"),
        ("config.yaml", to_yaml(SftConfig(run_dir="x")), r"dapo-jax sft"),
        ("config.yaml", "run_dir: x\nloss: {clip_ratio_hgih: 0.3}\n", r"loss.clip_ratio_hgih"),
    ],
)
def test_damaged_runs_are_refused(file, content, message, tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    (run / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_runs([run])


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["{tmp}/nowhere"], r"nowhere is not a run"),
        (["{tmp}"], r"neither config.yaml nor metrics.jsonl"),
        (["{tmp}/file"], r"it is a file"),
        (["s3://x"], r"s3://x"),
        ([], r"at least one run"),
        (["{tmp}/run", "{tmp}/run"], r"is named twice"),
    ],
)
def test_folders_without_a_run_are_refused(places, message, tmp_path):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=message):
        read_runs([place.format(tmp=tmp_path) for place in places])


NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def run(tmp_path):
    """All five steps are done; everything was written an hour before `NOW`."""
    folder = write_run(tmp_path / "run", steps=5, tokenizer=False)
    touch(folder, NOW - timedelta(hours=1))
    return folder


def touch(folder, when):
    for path in folder.rglob("*"):
        os.utime(path, (when.timestamp(), when.timestamp()))


def state(folder, now=NOW):
    [found] = read_runs([folder])
    return state_of(folder, found.config, found.rows, now=now)


def with_status(folder, kind, reason="", **process):
    """Writes the status of a run on another machine."""
    write_status(folder, kind, reason)
    there = json.loads((folder / FILE).read_text())
    there["process"] |= {"host": "elsewhere", **process}
    (folder / FILE).write_text(json.dumps(there))
    touch(folder, NOW - timedelta(hours=1))


@pytest.mark.parametrize("kind", ["finished", "stopped", "failed"])
def test_the_status_of_an_ended_run_is_its_state(run, kind):
    with_status(run, kind, "why")
    found = state(run)
    assert (found.kind, found.reason) == (kind, "why")
    assert found.at == read_status(run).at


def test_a_local_run_is_running_while_its_process_exists(run):
    write_status(run, "running")
    touch(run, NOW - timedelta(days=3))
    assert state(run).kind == "running"  # this process, although it is silent
    with_status(run, "running", host=read_status(run).process.host, started="another")
    found = state(run)
    assert (found.kind, found.at) == ("silent", "2026-03-01T11:00:00+00:00")


def test_a_run_elsewhere_is_silent_after_three_of_its_longest_steps(run):
    """Steps of `metrics_line` take 20.5 s, with an evaluation 50.5 s: ten minutes are more. A step of an hour allows three."""
    with_status(run, "running")
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
