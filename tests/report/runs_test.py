"""Reading runs, also while they run; their state; and errors."""

import os
import socket
from datetime import UTC, datetime

import pytest

from dapo_jax.config import ConfigError, SftConfig, to_yaml
from dapo_jax.report.runs import read_runs
from dapo_jax.storage.locks import take
from dapo_jax.trackers.run_status import RunStatus, read_status, write_status
from tests.report.made import problem_line, write_evaluation, write_run

WRITTEN = datetime(2026, 3, 1, 12, tzinfo=UTC)


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


def test_names_are_as_short_as_possible(tmp_path):
    places = [tmp_path / "lr" / "seed0", tmp_path / "clip" / "seed0", tmp_path / "clip" / "seed1"]
    for place in places:
        write_run(place, steps=1)
    assert [run.name for run in read_runs(places)] == ["lr/seed0", "clip/seed0", "clip/seed1"]
    assert [run.name for run in read_runs(places[:1])] == ["seed0"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 0}\n{oops\n{"step": 1}\n', r"metrics.jsonl, line 2 is not"),
        ("metrics.jsonl", "", r"has no metrics yet"),
        ("config.yaml", to_yaml(SftConfig(run_dir="x")), r"only for runs of dapo-jax train"),
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
        (["{tmp}"], r"neither config.yaml nor metrics.jsonl"),
        (["{tmp}/file"], r"it is a file"),
        ([], r"at least one run"),
        (["{tmp}/run", "{tmp}/run"], r"is named twice"),
    ],
)
def test_folders_without_a_run_are_refused(places, message, tmp_path):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=message):
        read_runs([place.format(tmp=tmp_path) for place in places])


@pytest.fixture
def run(tmp_path):
    """All five steps are done; the last file was written on the first of March."""
    folder = write_run(tmp_path / "run", steps=5, tokenizer=False)
    touch(folder)
    return folder


def touch(folder):
    for path in folder.rglob("*"):
        os.utime(path, (WRITTEN.timestamp(), WRITTEN.timestamp()))


def status(folder):
    [found] = read_runs([folder])
    return found.status


@pytest.mark.parametrize("kind", ["finished", "stopped", "failed"])
def test_the_status_of_an_ended_run_is_its_state(run, kind):
    write_status(run, kind, "why")
    found = status(run)
    assert (found.state, found.reason) == (kind, "why")
    assert found.at == read_status(run).at


def test_a_run_is_running_while_it_holds_its_lock_and_a_copy_is_not_known(run):
    with take(run, lost=print):
        write_status(run, "running")
        touch(run)
        assert status(run) == RunStatus(state="running", at=WRITTEN.isoformat())
        holder = (run / ".lock").read_text()
    assert status(run) == RunStatus(state="silent", at=WRITTEN.isoformat())
    (run / ".lock").write_text(holder.replace(socket.gethostname(), "elsewhere"))
    assert status(run).state == "unknown"
    (run / ".lock").unlink()
    assert status(run).state == "unknown"


def test_a_run_without_a_status_is_finished_if_its_model_and_its_last_step_are_there(run):
    assert status(run).state == "unknown"
    (run / "model").mkdir()
    assert status(run).state == "finished"
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("steps: 5", "steps: 6"))
    assert (status(run).state, status(run).at[:10]) == ("unknown", "2026-03-01")
