"""The status of a run: running, or the time and reason of its end."""

import platform
from datetime import UTC, datetime, timedelta

import jax
import pytest

import dapo_jax
from dapo_jax.health.stopping import StoppedError
from dapo_jax.trackers.run_status import FILE, read_status, status_kept, write_status


def state_of(folder):
    status = read_status(folder)
    return status.state, status.reason


def test_a_run_is_running_until_it_has_finished(tmp_path):
    with status_kept(tmp_path):
        assert state_of(tmp_path) == ("running", "")
    assert state_of(tmp_path) == ("running", "")  # its model is yet to be written
    write_status(tmp_path, "finished")
    assert state_of(tmp_path) == ("finished", "")
    assert abs(datetime.fromisoformat(read_status(tmp_path).at) - datetime.now(UTC)) < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (StoppedError("SIGTERM"), "stopped", "SIGTERM"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
        (RuntimeError("one\nline  and\nmore"), "failed", "RuntimeError: one line and more"),
        (ValueError("x" * 10_000), "failed", ("ValueError: " + "x" * 500)[:500]),
    ],
    ids=["signal", "interrupted", "error", "long"],
)
def test_a_run_that_ends_early_keeps_the_reason(tmp_path, error, state, reason):
    with pytest.raises(type(error)), status_kept(tmp_path):
        raise error
    assert state_of(tmp_path) == (state, reason)


def test_the_error_is_kept_without_tokens_and_passwords(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    write_status(tmp_path, "failed", "hf_0123456789 at https://me:word@host")
    assert state_of(tmp_path) == ("failed", "$HF_TOKEN at https://me:...@host")


def test_a_status_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    def failing():
        (tmp_path / FILE).unlink()
        (tmp_path / FILE).mkdir()
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), status_kept(tmp_path):
        failing()


@pytest.mark.parametrize("text", ["", "{", '{"state": "running"}', "[1]"])
def test_a_damaged_file_is_no_status(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert read_status(tmp_path) is None
    assert read_status(tmp_path / "no such run") is None


def test_the_status_names_the_process_without_secrets(tmp_path, monkeypatch):
    """The command can be pasted into a shell, and a status of an earlier version without a process is read."""
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setattr("sys.argv", ["/bin/dapo-jax", "train", "a b.yaml", "x=hf_0123456789"])
    write_status(tmp_path, "running")
    found = read_status(tmp_path).process
    assert found["command line"] == "dapo-jax train 'a b.yaml' x=$HF_TOKEN"
    assert found["versions"].split(", ")[:2] == [f"dapo_jax {dapo_jax.__version__}", f"jax {jax.__version__}"]
    assert found["devices"] == "8 x cpu"
    assert platform.node() in found["machine"]
    (tmp_path / FILE).write_text('{"state": "stopped", "at": null, "reason": "SIGTERM"}')
    assert read_status(tmp_path).process == {}
