"""A run that is stopped in any phase of a step resumes to the same result."""

import json
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.health.stopping import StoppedError, stopped_by_signals
from dapo_jax.rollout.group_sampling import GroupSampling
from dapo_jax.run import end_of_step
from dapo_jax.run.resume_point import UNFINISHED
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.trackers import read_metrics
from dapo_jax.training.update import Updater


def never(status, message):
    raise AssertionError((status, message))


@contextmanager
def told_at(monkeypatch, owner, name, call):
    """Within, sends SIGTERM before the `call`-th call of a method."""
    whole, calls = getattr(owner, name), 0

    def told(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGTERM)
        return whole(*arguments, **options)

    with monkeypatch.context() as patched, stopped_by_signals(never) as stop:
        patched.setattr(owner, name, told)
        yield stop


def stopped(monkeypatch, run_micro, rows, config, owner, name, call):
    with told_at(monkeypatch, owner, name, call) as stop, pytest.raises(StoppedError, match="SIGTERM"):
        run_micro(config, eval_rows=rows, stop=stop)


def progress_of(config):
    """Step -> the progress in its checkpoint."""
    folders = sorted((Path(config.run_dir) / "checkpoints").iterdir())
    return {
        int(path.name): json.loads((path / "meta" / "metadata").read_text())["progress"] for path in folders
    }


NEVER_DUE = {"checkpoint__every_steps": 0, "checkpoint__keep_best": False}


@pytest.mark.parametrize("phase", [(DecoderEngine, "generate", 9), (Updater, "update", 4)], ids=str)
def test_a_stopped_run_saves_its_last_step_and_resumes(
    phase, finished, micro, run_micro, rows, same_run, monkeypatch
):
    """The call is in step 2 or 3. No regular checkpoint is due. `faults/stop_phases_test.py` has the other phases."""
    config = micro(**NEVER_DUE)
    stopped(monkeypatch, run_micro, rows, config, *phase)
    lines = read_metrics(f"{config.run_dir}/metrics.jsonl")
    assert lines[-1]["step"] in (1, 2, 3)
    assert max(progress_of(config)) == lines[-1]["step"]
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


def test_an_abandoned_evaluation_is_repeated(micro, run_micro, rows, same_run, monkeypatch):
    whole, config = (micro(eval__every_steps=1, **NEVER_DUE) for _ in range(2))
    whole = run_micro(whole, eval_rows=rows)
    stopped(monkeypatch, run_micro, rows, config, GroupSampling, "evaluate", 3)  # of step 2
    assert [line["step"] for line in read_metrics(f"{config.run_dir}/metrics.jsonl")] == [0, 1]
    [(step, progress)] = progress_of(config).items()
    assert (step, UNFINISHED in progress) == (2, True)
    # A second stop, in the repeated evaluation: the checkpoint stays the same.
    with told_at(monkeypatch, GroupSampling, "evaluate", 1) as stop, pytest.raises(StoppedError):
        run_micro(config, eval_rows=rows, resume=True, stop=stop)
    assert list(progress_of(config)) == [2]
    same_run(run_micro(config, eval_rows=rows, resume=True), whole)


def test_the_best_checkpoint_is_kept(micro, run_micro, rows):
    config = micro(eval__every_steps=1, checkpoint__every_steps=0, checkpoint__keep=1)
    result = run_micro(config, eval_rows=rows)
    scores = [line["eval/arithmetic/avg@4"] for line in result.metrics[1:]]
    best = 1 + scores.index(max(scores))
    assert {best, 4} <= set(progress_of(config))
    assert len(progress_of(config)) <= 2, "the best one before the last save, and the last one"


def test_scores_of_other_evaluation_settings_do_not_decide_which_checkpoint_is_the_best(
    monkeypatch, micro, run_micro, rows
):
    """0.9 on all prompts after step 1, then 0.2 on one prompt after step 2."""
    scores = iter([0.0, 0.9, 0.2])
    monkeypatch.setattr(end_of_step, "summarize", lambda groups, name: {f"eval/{name}/avg@4": next(scores)})
    config = micro(steps=1, eval__every_steps=1, checkpoint__keep=1)
    run_micro(config, eval_rows=rows)
    changed = replace(config, steps=2, eval=replace(config.eval, prompts=1))
    run_micro(changed, eval_rows=rows, resume=True)
    with Checkpointer(f"{config.run_dir}/checkpoints") as checkpointer:
        assert checkpointer.best() == (2, 0.2)
