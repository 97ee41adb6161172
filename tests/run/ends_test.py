"""A run that ends with an error saves its last step, names the checkpoint to resume from, and resumes to the same result."""

import errno
import time
from pathlib import Path

import pytest

from dapo_jax.checkpoints import manifest
from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import CheckpointError
from dapo_jax.cli import _outcome
from dapo_jax.dapo.dynamic_sampling import ShortfallError
from dapo_jax.rewards.functions import RewardError
from dapo_jax.run.policy import Policy
from dapo_jax.trackers import JsonlTracker, read_metrics
from dapo_jax.training.update import Updater

NEVER_DUE = {"checkpoint__every_steps": 0, "checkpoint__keep_best": False}


def no_space():
    return OSError(errno.ENOSPC, "No space left on device")


def saved(config):
    folder = Path(config.run_dir) / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def last_line(config):
    return read_metrics(f"{config.run_dir}/metrics.jsonl")[-1]["step"]


def assert_named(caught, config, step):
    [note] = caught.value.__notes__
    assert f"step {step} in {config.run_dir}/checkpoints: --resume" in note


def raises(sample):
    raise ValueError("a mistake")


@pytest.mark.parametrize(
    ("wrong", "error"),
    # Slow: two more runs. The next test has a reward that raises.
    [
        pytest.param(raises, RewardError, id="raises", marks=pytest.mark.slow),
        pytest.param(lambda sample: False, ShortfallError, id="shortfall"),
    ],
)
def test_a_reward_that_fails_after_steps_costs_none_of_them(
    wrong, error, finished, micro, run_micro, rows, same_run, even_sum
):
    """The reward fails after step 2. Step 3 may still succeed with carried groups."""
    config, failing = micro(**NEVER_DUE), False

    def reward(sample):
        return wrong(sample) if failing else even_sum(sample)

    def fail(step, metrics):
        nonlocal failing
        failing = step >= 2

    with pytest.raises(error) as caught:
        run_micro(config, eval_rows=rows, reward=reward, on_step=fail)
    step = last_line(config)
    assert step in (2, 3)
    assert saved(config) == [str(step)]
    assert_named(caught, config, step)
    assert _outcome(caught.value, "train")[1].endswith(f"; {caught.value.__notes__[0]}")
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


def test_before_the_first_step_no_checkpoint_is_promised(micro, run_micro, rows):
    config = micro()
    with pytest.raises(RewardError) as caught:
        run_micro(config, eval_rows=rows, reward=raises)
    assert caught.value.__notes__[0].startswith("there is no checkpoint yet: --resume")
    assert not saved(config)


def test_metrics_that_cannot_be_written_are_in_the_checkpoint(
    finished, micro, run_micro, rows, same_run, monkeypatch
):
    config, log = micro(**NEVER_DUE), JsonlTracker.log

    def full(self, step, metrics):
        if step == 3:
            raise no_space()
        log(self, step, metrics)

    monkeypatch.setattr(JsonlTracker, "log", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run_micro(config, eval_rows=rows)
    monkeypatch.undo()
    assert (last_line(config), saved(config)) == (2, ["3"])
    assert_named(caught, config, 3)
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


def test_a_step_whose_weights_were_changed_is_not_promised(micro, run_micro, monkeypatch):
    """The fourth update is the second of step 2. The first of step 2 has consumed the state of step 1."""
    config, update, calls = micro(**NEVER_DUE), Updater.update, 0

    def fails(self, *of, **how):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")
        return update(self, *of, **how)

    monkeypatch.setattr(Updater, "update", fails)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        run_micro(config)
    assert "(step 1 can no longer be saved" in caught.value.__notes__[0]
    assert not saved(config)


def test_a_model_that_cannot_be_written_is_written_by_resuming(
    finished, micro, run_micro, rows, same_run, monkeypatch
):
    config = micro(**NEVER_DUE)

    def full(self, folder):
        raise no_space()

    monkeypatch.setattr(Policy, "save", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run_micro(config, eval_rows=rows)
    assert_named(caught, config, 4)
    monkeypatch.undo()
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)
    assert Path(config.run_dir, "model").is_dir()


@pytest.fixture
def unwritable(monkeypatch):
    """Makes saves of these steps fail at their end, on their own thread, once for each time that a step is named. `failure` waits for the
    end of a save."""

    def make(*steps):
        write, failure, left = manifest.write_manifest, Checkpointer.failure, list(steps)

        def full(folder, known):
            if (step := int(folder.name.partition(".")[0])) in left:
                left.remove(step)
                raise no_space()
            write(folder, known)

        def later(self):
            while self._manager.is_saving_in_progress():
                time.sleep(0.01)
            return failure(self)

        monkeypatch.setattr(manifest, "write_manifest", full)
        monkeypatch.setattr(Checkpointer, "failure", later)

    return make


def test_a_failed_save_is_reported_at_once_and_tried_once_more(
    finished, micro, run_micro, rows, same_run, unwritable, monkeypatch
):
    config = micro(checkpoint__every_steps=2, checkpoint__keep_best=False)
    unwritable(2)
    with pytest.raises(CheckpointError, match=r"step 2 in .*No space left on device") as caught:
        run_micro(config, eval_rows=rows)
    assert (last_line(config), saved(config)) == (2, ["2"])
    assert_named(caught, config, 2)
    monkeypatch.undo()
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


def test_after_two_failed_saves_the_last_good_checkpoint_is_named(micro, run_micro, unwritable):
    config = micro(checkpoint__every_steps=1)
    unwritable(2, 2)
    with pytest.raises(CheckpointError, match="saving checkpoint step 2") as caught:
        run_micro(config)
    assert saved(config) == ["1"]
    assert_named(caught, config, 1)
    assert "step 2 could not be saved: saving" in caught.value.__notes__[0]
