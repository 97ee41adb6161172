"""What a run writes beside its checkpoints."""

from dataclasses import replace

import pytest

from dapo_jax.run.records import Records
from dapo_jax.trackers import read_metrics


@pytest.mark.parametrize(("resume_step", "kept"), [(-1, []), (0, [0]), (1, [0, 1])])
def test_resuming_keeps_the_lines_up_to_the_checkpoint(resume_step, kept, micro, tmp_path):
    """-1 is a run without a checkpoint: the evaluation before training is repeated, so its line goes too."""
    with Records(micro(), tmp_path, resume_step=None) as records:
        for step in (0, 1, 2):
            records.step(step, {"reward/mean": 0.5}, None)
    with Records(micro(), tmp_path, resume_step=resume_step) as records:
        assert [line["step"] for line in records.read()] == kept


def test_a_new_run_does_not_append_to_another_runs_metrics(micro, tmp_path):
    with Records(micro(), tmp_path, resume_step=None) as records:
        records.step(0, {"reward/mean": 0.5}, None)
    with pytest.raises(FileExistsError, match="already holds"):
        Records(micro(), tmp_path, resume_step=None)


def test_tensorboard_takes_the_same_numbers(micro, tmp_path):
    pytest.importorskip("tensorboardX")
    config = micro(log__tensorboard=True)
    with Records(config, tmp_path, resume_step=None) as records:
        records.step(1, {"reward/mean": 0.5}, None)
    assert list((tmp_path / "tensorboard").iterdir())
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]
    assert replace(config.log, tensorboard=False) == micro().log
