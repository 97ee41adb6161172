"""A run that is told to stop, in every phase of a step: what is left goes on as if nothing had been."""

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
    """SIGTERM before the `call`-th call of a method."""
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
    """Step -> what its checkpoint says beside the arrays."""
    found = {}
    for path in sorted((Path(config.run_dir) / "checkpoints").iterdir()):
        found[int(path.name)] = json.loads((path / "meta" / "metadata").read_text())["progress"]
    return found


PHASES = {
    # Counted from the first evaluation on: each call falls into step 2 or 3.
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
def test_a_run_that_is_told_to_stop_saves_its_last_boundary_and_goes_on(
    phase, finished, micro, run_micro, rows, same_run, monkeypatch
):
    """Without a checkpoint that is due: whatever is there was saved for the stop."""
    every = 1 if phase == "saving" else 0
    config = micro(checkpoint__every_steps=every, checkpoint__keep_best=False)
    stopped(monkeypatch, run_micro, rows, config, *PHASES[phase])
    lines = read_metrics(f"{config.run_dir}/metrics.jsonl")
    assert lines[-1]["step"] in (1, 2, 3)
    assert max(progress_of(config)) == lines[-1]["step"]
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)


def test_an_evaluation_that_is_abandoned_is_made_up(micro, run_micro, rows, same_run, monkeypatch):
    config = micro(eval__every_steps=1, checkpoint__every_steps=0, checkpoint__keep_best=False)
    whole = run_micro(config, eval_rows=rows)
    config = micro(eval__every_steps=1, checkpoint__every_steps=0, checkpoint__keep_best=False)
    stopped(monkeypatch, run_micro, rows, config, GroupSampling, "evaluate", 3)  # of step 2
    assert [line["step"] for line in read_metrics(f"{config.run_dir}/metrics.jsonl")] == [0, 1]
    [(step, progress)] = progress_of(config).items()
    assert (step, UNFINISHED in progress) == (2, True)
    again = "a second stop, in the evaluation that is made up: the checkpoint is the one that it started from"
    with told_at(monkeypatch, GroupSampling, "evaluate", 1) as stop, pytest.raises(StoppedError):
        run_micro(config, eval_rows=rows, resume=True, stop=stop)
    assert list(progress_of(config)) == [2], again
    same_run(run_micro(config, eval_rows=rows, resume=True), whole)


@pytest.mark.slow
def test_the_checkpoint_of_an_evaluation_that_was_made_up_may_be_resumed_once_more(
    micro, run_micro, rows, same_run, monkeypatch
):
    """Its line is written by then; it is written anew."""
    settings = {"eval__every_steps": 1, "checkpoint__every_steps": 0, "checkpoint__keep_best": False}
    whole = run_micro(micro(**settings), eval_rows=rows)
    config = micro(**settings)
    stopped(monkeypatch, run_micro, rows, config, GroupSampling, "evaluate", 3)

    def interrupt(step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_micro(config, eval_rows=rows, resume=True, on_step=interrupt)
    assert [line["step"] for line in read_metrics(f"{config.run_dir}/metrics.jsonl")] == [0, 1, 2]
    same_run(run_micro(config, eval_rows=rows, resume=True), whole)


@pytest.mark.slow
def test_before_the_first_step_nothing_is_saved(finished, micro, run_micro, rows, same_run, monkeypatch):
    config = micro()
    stopped(monkeypatch, run_micro, rows, config, GroupSampling, "evaluate", 1)
    assert not (Path(config.run_dir) / "checkpoints").exists()
    assert read_status(Path(config.run_dir)).state == "stopped"
    same_run(run_micro(config, eval_rows=rows, resume=True), finished)
    assert read_status(Path(config.run_dir)).state == "finished"


def test_the_best_checkpoint_stays(micro, run_micro, rows):
    config = micro(eval__every_steps=1, checkpoint__every_steps=0, checkpoint__keep=1)
    result = run_micro(config, eval_rows=rows)
    scores = [line["eval/arithmetic/avg@4"] for line in result.metrics[1:]]
    best = 1 + scores.index(max(scores))
    assert {best, 4} <= set(progress_of(config))
    assert len(progress_of(config)) <= 2, "the best one before the last save, and the last one"
