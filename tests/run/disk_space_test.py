"""A run is refused before it begins if the disks have too little room."""

import io
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from dapo_jax.config import (
    CheckpointConfig,
    ConfigError,
    EvalConfig,
    TrainConfig,
)
from dapo_jax.run.disk_space import bytes_to_write, room_for
from dapo_jax.trackers.progress import Progress

Usage = namedtuple("Usage", ("total", "used", "free"))
GIB = 2**30


def free(monkeypatch, size):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**50, 0, size))


def test_a_run_that_would_fill_the_disk_is_refused_before_anything_is_written(
    micro, run_micro, monkeypatch, tmp_path
):
    free(monkeypatch, 0)
    with pytest.raises(
        ConfigError,
        match=r"0 MiB free for run_dir, .*: free 1 MiB more",
    ):
        run_micro(micro(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_that_leaves_little_room_is_warned(micro, run_micro, monkeypatch):
    free(monkeypatch, GIB // 2)
    config, shown = micro(steps=0), io.StringIO()
    run_micro(config, progress=Progress(config.steps, console=Console(file=shown, width=10_000)))
    assert "512 MiB free for run_dir" in shown.getvalue()


@pytest.mark.parametrize(
    ("steps", "every", "keep", "best", "evaluated", "checkpoints"),
    [
        (100, 10, 3, False, 10, 4),  # three are kept while a fourth is written
        (100, 10, 3, True, 10, 5),  # and the best one may be older
        (100, 10, 3, True, 0, 4),  # without scores none is the best
        (100, 0, 3, False, 10, 1),  # only the last step's
        (5, 10, 3, True, 2, 3),  # of steps 2, 4 and 5
    ],
)
def test_a_run_writes_its_checkpoints_and_its_model(
    steps, every, keep, best, evaluated, checkpoints, tmp_path
):
    """12 bytes per parameter for weights and two moments, 4 for the model; minus the files that exist."""
    config = TrainConfig(
        run_dir=str(tmp_path), steps=steps, eval=EvalConfig(every_steps=evaluated),
        checkpoint=CheckpointConfig(every_steps=every, keep=keep, keep_best=best),
    )  # fmt: skip
    size = 1000 * (12 * checkpoints + 4)
    assert bytes_to_write(config, 1000)["run_dir"] == (str(tmp_path), size)
    Path(tmp_path, "checkpoints", "10").mkdir(parents=True)
    Path(tmp_path, "checkpoints", "10", "state").write_bytes(bytes(12_000))
    assert bytes_to_write(config, 1000)["run_dir"] == (str(tmp_path), size - 12_000)


def test_folders_on_one_disk_share_it(monkeypatch, tmp_path):
    free(monkeypatch, 3 * GIB)
    room = room_for(
        {"run_dir": (str(tmp_path / "a"), 2 * GIB), "TFDS_DATA_DIR": (str(tmp_path / "b"), 2 * GIB)}
    )
    assert (room.state, room.message) == ("failed", "3.0 GiB free for run_dir, TFDS_DATA_DIR, 4.0 GiB needed")


def test_the_remedy_suffices(monkeypatch, tmp_path):
    """60 MiB are enough for 36, and 12 are 24 too few: a gibibyte to spare is advice."""
    places, mib = {"run_dir": (str(tmp_path), 36 << 20)}, 1 << 20
    free(monkeypatch, 12 * mib)
    assert room_for(places).remedy.startswith("free 24 MiB more, or set run_dir")
    free(monkeypatch, 36 * mib)
    assert room_for(places).state == "warning"
    free(monkeypatch, 60 * mib)
    assert room_for(places).remedy.startswith(
        "1.0 GiB of spare room is recommended: free 1,000 MiB more, or set run_dir"
    )
