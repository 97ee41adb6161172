"""SIGTERM in each phase of a step: the process ends within 30 s with status 75, and can be resumed."""

import signal
import time

import numpy as np
import pytest

from dapo_jax.health.stopping import STOPPED
from tests.faults.micro import assert_the_same_run, make_run

SLOW = """
import sys, time
from pathlib import Path
from importlib import import_module
from dapo_jax.cli import main

module, owner, method, call, marker, *arguments = sys.argv[1:]
owner, calls = getattr(import_module(module), owner), []
whole = getattr(owner, method)

def slow(*arguments, **options):
    calls.append(0)
    if len(calls) == int(call):
        Path(marker).touch()
        time.sleep(3)
    return whole(*arguments, **options)

setattr(owner, method, slow)
sys.exit(main(arguments))
"""

PHASES = {
    "sampling": ("dapo_jax.sampling.engine", "DecoderEngine", "generate", 14),
    "grading": ("dapo_jax.rewards.grading", "Grading", "groups", 4),
    "updating": ("dapo_jax.training.update", "Updater", "update", 4),
    "saving": ("dapo_jax.checkpoints.checkpointer", "Checkpointer", "save", 2),
    "evaluating": ("dapo_jax.rollout.group_sampling", "GroupSampling", "evaluate", 2),
}
"""The function that is slow in its so many-th call, during which the signal arrives."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("whole"), steps=5, eval_every=2)
    run.finish()
    return run


@pytest.mark.slow  # each starts two processes; in its own process tests/run/stop_test.py stops runs while they sample and update
@pytest.mark.parametrize("phase", PHASES)
def test_it_ends_within_30_s_and_can_be_resumed(phase, whole, tmp_path):
    run, marker = make_run(tmp_path, steps=5, eval_every=2), tmp_path / "now"
    slow = [*PHASES[phase], marker]
    program = ("-c", SLOW, *map(str, slow))
    every = 2 if phase == "saving" else 0  # in the other phases only the stop saves a checkpoint
    process = run.start(f"checkpoint.every_steps={every}", "checkpoint.keep_best=false", program=program)
    run.wait_for(process, marker.exists)
    assert ended_by(process, signal.SIGTERM) < 30
    assert process.returncode == STOPPED
    assert 0 < max(run.steps()) < 5
    run.finish("--resume")
    assert_the_same_run(run.run_dir, whole.run_dir)


@pytest.mark.slow
def test_a_grader_that_hangs_does_not_delay_the_stop(whole, tmp_path):
    """Its time limit is ten minutes."""
    run = make_run(tmp_path, steps=5, eval_every=2)
    process = run.start()
    run.wait_for(process, lambda: run.steps())
    (tmp_path / "grader_waits").touch()
    run.wait_for(process, (tmp_path / "grader_waits_now").exists)
    assert ended_by(process, signal.SIGTERM) < 30
    (tmp_path / "grader_waits").unlink()
    run.finish("--resume")
    assert_the_same_run(run.run_dir, whole.run_dir)


@pytest.mark.slow
def test_stopped_at_twenty_random_moments_it_is_the_uninterrupted_run(tmp_path):
    """Also during imports, before there is anything to save."""
    whole = make_run(tmp_path / "whole", steps=100, eval_every=3)
    run = make_run(tmp_path / "stopped", steps=100, eval_every=3)
    whole.finish()
    rng, statuses = np.random.default_rng(0), []
    for _ in range(20):
        process = run.start("--resume")
        time.sleep(rng.uniform(0.0, 12.0))
        assert ended_by(process, rng.choice([signal.SIGTERM, signal.SIGINT])) < 30
        statuses.append(process.returncode)
    # Before the command has installed its handlers a signal ends it as Python does.
    assert set(statuses) <= {STOPPED, 0, -signal.SIGTERM, -signal.SIGINT, 1, 130}
    assert statuses.count(STOPPED) >= 5
    run.finish("--resume")
    assert_the_same_run(run.run_dir, whole.run_dir)


def ended_by(process, number):
    """Returns the seconds until the process has ended."""
    began = time.monotonic()
    process.send_signal(int(number))
    try:
        process.communicate(timeout=40)
    finally:
        process.kill()
    return time.monotonic() - began
