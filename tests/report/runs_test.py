"""What is read of a run, also while it is going on, and what is said where there is nothing to read."""

import json

import pytest

from dapo_jax.config import ConfigError, SftConfig, to_yaml
from dapo_jax.report import report
from dapo_jax.report.runs import read_runs
from tests.report.made import problem_line, write_evaluation, write_run


def test_a_run_that_is_going_on_is_read_up_to_its_last_whole_line(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/accu')
    [found] = read_runs([run])
    assert [row["step"] for row in found.rows] == [0, 1, 2, 3]
    assert found.last_step == 3
    assert found.config.steps == 3
    assert [path.name for path in found.logged] == [f"step_{step:06d}.jsonl" for step in (1, 2, 3)]


def test_a_step_that_is_in_a_file_and_in_an_object_counts_once(tmp_path):
    """A run that was copied from a bucket and went on locally."""
    run = write_run(tmp_path / "run", steps=2)
    (run / "metrics").mkdir()
    (run / "metrics" / "000001.jsonl").write_text('{"step": 1, "rollout/accuracy": 0.125}\n')
    [found] = read_runs([run])
    assert [row["step"] for row in found.rows] == [0, 1, 2]


def test_evaluations_are_found_in_the_order_of_their_steps_and_what_is_none_is_passed_over(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    for step in (20, 3, 1_000_000):
        for name in ("b", "a"):
            write_evaluation(run, step, [problem_line(0, 1)], name=name)
    (run / "evaluations" / "step_000005").write_text("a file where a folder should be")
    (run / "evaluations" / "step_000003" / "notes.txt").write_text("mine")
    (run / "evaluations" / "mine").mkdir()
    [found] = read_runs([run])
    assert [f"{path.parent.name}/{path.name}" for path in found.evaluations] == [
        f"step_{step}/{name}.jsonl" for step in ("000003", "000020", "1000000") for name in ("a", "b")
    ]
    other = write_run(tmp_path / "other", steps=1, every=9)
    (other / "evaluations").write_text("a file where a folder should be")
    assert read_runs([other])[0].evaluations == []


def test_metrics_without_a_configuration_are_a_run_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/accuracy": 0.5}\n')
    [found] = read_runs([tmp_path])
    assert found.config is None
    assert found.logged == []


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


def test_names_are_as_long_as_it_takes(tmp_path):
    places = [tmp_path / "lr" / "seed0", tmp_path / "clip" / "seed0", tmp_path / "clip" / "seed1"]
    for place in places:
        write_run(place, steps=1)
    assert [run.name for run in read_runs(places)] == ["lr/seed0", "clip/seed0", "clip/seed1"]
    assert [run.name for run in read_runs(places[:1])] == ["seed0"]


def damaged(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{oops", *lines[1:]]) + "\n")


def without_metrics(run):
    (run / "metrics.jsonl").unlink()


def of_another_kind(run):
    (run / "config.yaml").write_text(to_yaml(SftConfig(run_dir="x")))


def misspelt(run):
    (run / "config.yaml").write_text("run_dir: x\nsteps: 3\nloss: {clip_ratio_hgih: 0.3}\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damaged, r"metrics.jsonl, line 2 is damaged .*; mend that file"),
        (without_metrics, r"has no metrics yet: .* after the first evaluation or step"),
        (lambda run: (run / "metrics.jsonl").write_text(""), r"has no metrics yet"),
        (of_another_kind, r"run is a warm start \(dapo-jax sft\)"),
        (misspelt, r"config.yaml: unknown key loss.clip_ratio_hgih"),
    ],
)
def test_what_cannot_be_shown_is_said(change, message, tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    change(run)
    with pytest.raises(ConfigError, match=message):
        read_runs([run])


@pytest.mark.parametrize("number", ["1" * 400, str(2**63), "1e999", "Infinity", "NaN"])
@pytest.mark.parametrize("key", ["step", "rollout/accuracy", "rollout/trained_groups", "time/step_s"])
def test_numbers_that_no_array_holds_are_a_damaged_line(key, number, tmp_path):
    """Python's integers have no end, and its JSON knows numbers that are none."""
    run = write_run(tmp_path / "run", steps=2)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = {"step": 1, **json.loads(lines[0]), key: "HERE"}
    text = json.dumps(row).replace('"HERE"', number)
    (run / "metrics.jsonl").write_text("\n".join([text, *lines[1:]]) + "\n")
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1 is damaged .*; mend that file"):
        report(run)


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is no run: there is no such folder"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"it has neither config.yaml nor metrics.jsonl"):
        read_runs([tmp_path])
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match=r"file is no run: it is a file"):
        read_runs([tmp_path / "file"])
    with pytest.raises(ConfigError, match=r"s3://x is neither a local path"):
        read_runs(["s3://x"])
    with pytest.raises(ConfigError, match=r"at least one run"):
        read_runs([])


def test_a_run_is_shown_once(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="is named twice"):
        read_runs([run, run])
