"""`dapo-jax report`: its files, its output, and its errors."""

import json
import time

import pytest

from dapo_jax.cli import main
from dapo_jax.report import server
from tests.report.made import write_metrics, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=3)


def test_the_page_goes_into_the_first_runs_folder(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", steps=2)
    assert main(["report", str(run), str(other)]) == 0
    page = run / "report.html"
    assert capsys.readouterr().out == f"{page}: {page.stat().st_size / 1e6:.1f} MB\n"
    assert "run, other · dapo_jax report" in page.read_text()


def test_page_figures_and_trace_go_to_the_named_places(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = write_metrics(tmp_path / "few", {"step": 1, "update/loss": 0.5})
    out, folder, trace = tmp_path / "page.html", tmp_path / "figures", tmp_path / "trace.json"
    assert main(["report", str(run), "--out", str(out), "--png", str(folder), "--trace", str(trace)]) == 0
    assert out.is_file()
    assert not (run / "report.html").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "overview.png"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert [each["name"] for each in events if each["name"].startswith("step")] == ["step 1"]
    assert f"{trace}: {len(events)} events" in capsys.readouterr().out


def test_a_run_in_a_bucket_has_its_page_there(run, bucket):
    for file in run.rglob("*"):
        if file.is_file():
            name = f"here/{file.relative_to(run)}".replace("metrics.jsonl", "metrics/000000.jsonl")
            bucket.buckets["bucket"][name] = (file.read_bytes(), 1)
    assert main(["report", "gs://bucket/here"]) == 0
    page = bucket.files("gs://bucket/here/report.html")["gs://bucket/here/report.html"]
    assert page.startswith(b"<!doctype html>")
    # The tokenizer is there too: borders of tokens are known.
    assert b'"pieces":true' in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a run: there is no such folder"),
        (["RUN", "--rollout-steps", "-2"], "rollout_steps: found -2"),
        (["RUN", "--port", "8000"], "--port 8000 can only be used with --watch"),
        (["RUN", "--watch", "--out", "page.html"], "--out page.html"),
        (["RUN", "--watch", "--port", "-1"], "port: found -1, needs 0 (any free port) to 65535"),
        (["RUN", "--trace", "RUN/config.yaml/a.json"], "--trace"),
        (["s3://x/y", "--watch"], "s3://x/y is neither a local path nor in a bucket"),
        (["RUN", "--out", "s3://x/y"], "s3://x/y is neither a local path nor in a bucket"),
        (["RUN", "--out", "RUN/config.yaml/page.html"], "cannot write"),
    ],
)
def test_a_usage_error_is_one_message_and_status_2(arguments, message, run, capsys):
    assert main(["report", *(text.replace("RUN", str(run)) for text in arguments)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dapo-jax report: ")
    assert message in line


def test_a_run_that_is_not_there_yet_is_waited_for_when_it_is_watched(tmp_path, monkeypatch, capsys):
    coming, run, waits = write_run(tmp_path / "coming", steps=2), tmp_path / "run", []

    def later(seconds):
        waits.append(seconds)
        if len(waits) == 1:
            run.mkdir()
        if len(waits) == 3:
            (run / "config.yaml").write_text((coming / "config.yaml").read_text())

    def interrupted(self, poll_interval):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", later)
    monkeypatch.setattr(server._Server, "serve_forever", interrupted)
    assert main(["report", str(coming), str(run), "--watch"]) == 0
    found = capsys.readouterr()
    assert str(run) in found.err
    assert found.out.startswith("watching coming, run: http://127.0.0.1:")
    assert len(waits) == 3


def test_waiting_ends_with_ctrl_c(tmp_path, monkeypatch, capsys):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    assert main(["report", str(tmp_path / "never"), "--watch"]) == 0
    assert capsys.readouterr().out == "\nno longer watching\n"
