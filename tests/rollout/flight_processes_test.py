"""Runs of several processes whose rollouts stay in flight: what one process trains, whatever each of them waits for."""

import signal
import time
from functools import partial

import pytest
from rich.console import Console

from dapo_jax.config import RolloutConfig
from dapo_jax.run import train
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.progress import Progress
from tests import several
from tests.rollout.waves_processes_test import assert_the_same

GRADER = '''
import os
import random
import time
from pathlib import Path

def third(sample):
    """About a third are; takes its time, each process another; fails in the process that a file beside this one names."""
    named = Path(__file__).with_name("fails_in")
    if named.exists() and named.read_text() == os.environ.get("JAX_PROCESS_ID"):
        raise RuntimeError("no verdict today")
    if os.environ.get("JAX_PROCESS_ID"):
        time.sleep(random.choice([0.0, 0.0, 0.0, 0.03]))
    return int(sample.tokens.sum()) % 3 == 0
'''

DELAYED = (
    several.CHECKED
    + """
import random
import time
from dapo_jax.cli import main
from dapo_jax.sampling.engine import DecoderEngine
decode = DecoderEngine.generate

def late(*arguments):
    time.sleep(random.choice([0.0, 0.0, 0.02]))
    return decode(*arguments)

DecoderEngine.generate = late
sys.exit(main(sys.argv[1:]))
"""
)
"""The command with processes that are slow at random."""


@pytest.fixture(scope="module")
def setting(on_disk, tmp_path_factory):
    """Makes the configuration of a run for the command line, and writes it: 20 responses in flight, groups of four."""
    flying = {"dynamic_sampling__surplus": "discard", "rollout": RolloutConfig(in_flight=20, round_tokens=2)}
    return partial(on_disk(tmp_path_factory.mktemp("flying"), GRADER, "third"), **flying)


@pytest.fixture(scope="module")
def one(setting):
    """What one process with all eight devices makes of it."""
    config, _ = setting("one", sampling__slots=24)
    result = train(config, progress=Progress(config.steps, console=Console(quiet=True)))
    assert any(line["rollout/age_max"] for line in result.metrics[1:])
    return result.run_dir


def trained(path, processes, *options):
    return several.run(
        DELAYED, "train", path, *options, processes=processes, devices=8 // processes, within_s=900
    )


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_what_one_trains(processes, setting, one):
    """Two share 20 as 10 and 10, in eight slots each; four as five each."""
    name = f"by_{processes}"
    _, path = setting(name, sampling__slots=8)
    trained(path, processes)
    assert_the_same(one.with_name(name), one)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
def test_a_run_of_two_processes_goes_on_with_one_and_with_four(setting, one, processes):
    name = f"resumed_{processes}"
    _, path = setting(name)
    trained(path, 2, "steps=2")
    trained(path, processes, "--resume")
    assert_the_same(one.with_name(name), one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes", "changes"),
    [
        ("shared", 4, {"parallel__sampler_hosts": 2}),
        ("spread", 2, {"parallel__data": 2, "parallel__sampler_tensor": 1, "sampling__slots": 4}),
    ],
)
def test_however_samplers_are_cut_out_of_the_devices(setting, one, name, processes, changes):
    _, path = setting(name, **changes)
    trained(path, processes)
    assert_the_same(one.with_name(name), one)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_lost_in_the_middle_of_a_round_ends_the_run_which_can_be_resumed(setting, one, how):
    name = f"lost_{how}"
    _, path = setting(name)
    fails, metrics = path.with_name("fails_in"), path.with_name(name) / "metrics.jsonl"
    started = several.start(DELAYED, "train", path, processes=2, devices=4)
    while not (metrics.exists() and '"step": 1,' in metrics.read_text()):
        assert started[0].poll() is None, started[0].communicate()
        time.sleep(0.1)
    if how == "raise":
        fails.write_text("1")
    else:
        started[1].send_signal(how)
    done = several.finish(started, within_s=60)
    fails.unlink(missing_ok=True)
    assert all(status not in (0, None) for status, _ in done), done
    if how == "raise":
        assert "no verdict today" in done[0][1]
        assert "(process 1)" in done[0][1]
    if how == signal.SIGTERM:
        assert "stopped by SIGTERM (process 1); the last good checkpoint is that of step" in done[0][1]
    saved = read_metrics(metrics)[-1]["step"]
    assert saved >= 1
    trained(path, 2, "--resume")
    assert_the_same(one.with_name(name), one)
