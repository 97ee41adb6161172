"""Weights & Biases, offline: nothing leaves the machine."""

import pytest

from dapo_jax.trackers import Tracker, WandbTracker


@pytest.fixture
def wandb_mode(monkeypatch):
    """Sets the mode; wandb reads its environment once a process, so it is shut down around each test."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield lambda mode: monkeypatch.setenv("WANDB_MODE", mode)
    wandb.teardown()


def test_a_run_is_continued_under_its_id(tmp_path, wandb_mode):
    wandb_mode("offline")
    run_dir = tmp_path / "run"
    first = WandbTracker(run_dir, "seed: 0")
    assert isinstance(first, Tracker)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": 0.5, "rollout/waves": 2})
    first.close()
    first.close()
    again = WandbTracker(run_dir, "seed: 0")
    again.log(2, {"reward/mean": 0.25})  # the steps after the checkpoint come a second time
    again.close()
    folders = [path.name for path in (run_dir / "wandb").glob("offline-run-*")]
    assert folders
    assert all((run_dir / "wandb_run_id").read_text() in name for name in folders)


def test_files_of_a_run_in_a_bucket_are_local(tmp_path, wandb_mode, monkeypatch, bucket):
    """wandb can only write local files; it would create a folder named `gs:`."""
    wandb_mode("offline")
    monkeypatch.chdir(tmp_path)
    tracker = WandbTracker("gs://bucket/some/run")
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]
