"""A run that is stopped in any phase of a step resumes to the same result."""

import json
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.health.stopping import StoppedError, stopped_by_signals
from dapo_jax.rewards.grading import Grading
from dapo_jax.rollout.group_sampling import GroupSampling
from dapo_jax.run.resume_point import UNFINISHED
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.run_status import read_status
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


PHASES = {
    # Counted from the first evaluation on: each call is in step 2 or 3.
    "sampling": (DecoderEngine, "generate", 9),
    "grading": (Grading, "groups", 4),
    "updating": (Updater, "update", 4),
    "saving": (Checkpointer, "save", 2),
    "reading weights": (Updater, "prepare", 3),
}


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(phase, marks=[pytest.mark.slow] * (phase not in ("sampling", "updating")))
        for phase in PHASES
    ],
)
def test_a_stopped_run_saves_its_last_step_and_resumes(
    phase, finished, micro, run_micro, rows, same_run, monkeypatch
):
    """No regular checkpoint is due, so it was saved for the stop."""
    every = 1 if phase == "saving" else 0
    config = micro(checkpoint__every_steps=every, checkpoint__keep_best=False)
    stopped(monkeypatch, run_micro, rows, config, *PHASES[phase])
    lines = read_metrics(f"{config.run_dir}/metrics.jsonl")
    assert lines[-1]["step"] in (1, 2, 3)
    assert max(progress_of(config)) == lines[-1]["step"]
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


EVALUATED = {"eval__every_steps": 1, "checkpoint__every_steps": 0, "checkpoint__keep_best": False}


def test_an_abandoned_evaluation_is_repeated(micro, run_micro, rows, same_run, monkeypatch):
    whole, config = run_micro(micro(**EVALUATED), eval_rows=rows), micro(**EVALUATED)
    stopped(monkeypatch, run_micro, rows, config, GroupSampling, "evaluate", 3)  # of step 2
    assert [line["step"] for line in read_metrics(f"{config.run_dir}/metrics.jsonl")] == [0, 1]
    [(step, progress)] = progress_of(config).items()
    assert (step, UNFINISHED in progress) == (2, True)
    # A second stop, in the repeated evaluation: the checkpoint stays the same.
    with told_at(monkeypatch, GroupSampling, "evaluate", 1) as stop, pytest.raises(StoppedError):
        run_micro(config, eval_rows=rows, resume=True, stop=stop)
    assert list(progress_of(config)) == [2]
    same_run(run_micro(config, eval_rows=rows, resume=True), whole)


@pytest.mark.slow  # the test above has one repetition
def test_an_evaluation_may_be_repeated_twice(micro, run_micro, rows, same_run, monkeypatch):
    """Its line is written by then and is replaced."""
    whole, config = run_micro(micro(**EVALUATED), eval_rows=rows), micro(**EVALUATED)
    stopped(monkeypatch, run_micro, rows, config, GroupSampling, "evaluate", 3)

    def interrupt(step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_micro(config, eval_rows=rows, resume=True, on_step=interrupt)
    assert [line["step"] for line in read_metrics(f"{config.run_dir}/metrics.jsonl")] == [0, 1, 2]
    same_run(run_micro(config, eval_rows=rows, resume=True), whole)


@pytest.mark.slow  # two more runs
def test_before_the_first_step_nothing_is_saved(finished, micro, run_micro, rows, same_run, monkeypatch):
    config = micro()
    stopped(monkeypatch, run_micro, rows, config, GroupSampling, "evaluate", 1)
    assert not (Path(config.run_dir) / "checkpoints").exists()
    assert read_status(Path(config.run_dir)).state == "stopped"
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)
    assert read_status(Path(config.run_dir)).state == "finished"


def test_the_best_checkpoint_is_kept(micro, run_micro, rows):
    config = micro(eval__every_steps=1, checkpoint__every_steps=0, checkpoint__keep=1)
    result = run_micro(config, eval_rows=rows)
    scores = [line["eval/arithmetic/avg@4"] for line in result.metrics[1:]]
    best = 1 + scores.index(max(scores))
    assert {best, 4} <= set(progress_of(config))
    assert len(progress_of(config)) <= 2, "the best one before the last save, and the last one"
