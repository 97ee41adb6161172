"""Several processes train what one trains, in waves and in flight: the same groups, the same numbers, the same checkpoints."""

import math
import signal
import time
from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dapo_jax.config import RolloutConfig
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.rollouts import Group
from dapo_jax.health.stopping import STOPPED
from dapo_jax.models.folder import load_model
from dapo_jax.rollout.checkpoint_arrays import group_arrays, groups_of
from dapo_jax.run import train
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.rollout_log import read_problems, read_rollouts
from dapo_jax.training.step_metrics import rollout_metrics
from tests import several
from tests.rollout.checkpoint_arrays_test import make_rollout, prompt_at, rollouts

GRADER = '''
import os
import random
import time
from pathlib import Path

def fails():
    """Fails in the process that a file next to this one names."""
    named = Path(__file__).with_name("fails_in")
    if named.exists() and named.read_text() == os.environ.get("JAX_PROCESS_ID"):
        raise RuntimeError("no verdict today")

def eleventh(sample):
    """About an eleventh are right, so often a further wave is needed."""
    fails()
    return int(sample.tokens.sum()) % 11 == 0

def third(sample):
    """About a third are right. Takes another time in each process."""
    fails()
    if os.environ.get("JAX_PROCESS_ID"):
        time.sleep(random.choice([0.0, 0.0, 0.0, 0.03]))
    return int(sample.tokens.sum()) % 3 == 0

def easy(sample):
    """All responses to a third of the prompts are right."""
    return sample.prompt.text.startswith("0") or third(sample)
'''

DELAYED = """
import random
import sys
import time
from dapo_jax.cli import main
from dapo_jax.sampling.engine import DecoderEngine
decode, calls = DecoderEngine.generate, []

def late(*arguments):
    calls.append(0)
    time.sleep(random.choice([0.0, 0.0, 0.02]))
    return decode(*arguments)

DecoderEngine.generate = late
status = main(sys.argv[1:])
print("decode calls:", len(calls))
sys.exit(status)
"""
"""The command with processes that are slow at random, and the number of their decode calls."""

TOLERANCE = 2e-6
"""Of trained parameters. Devices in one process and in several add up a gradient in another order: 8 addends in float32, clipped
to a norm of 1, differ by 8 x 2^-24 = 4.8e-7. AdamW divides by at least epsilon = 0.1, and the learning rate is 0.05: 2.4e-7 an
update, 1.9e-6 in 8 updates. (9e-8 was seen.)"""

FROM_LOGPROBS = ("rollout/copies_z", "rollout/distinct_expected_frac")
"""Metrics of rollouts that devices compute in part."""

ROUNDING = 2e-6
"""Of metrics in nats near 2.4, where float32 values are 2.4e-7 apart: 8 addends."""


@given(drawn=st.lists(st.lists(rollouts, min_size=1, max_size=3), min_size=1, max_size=4))
def test_groups_in_brief_have_the_metrics_of_whole_ones(drawn):
    parts = sorted({name for group in drawn for values in group for name in values["verdict"]["parts"]})
    for group in drawn:
        for values in group:  # all responses of a run have the same parts
            values["verdict"]["parts"] = {name: values["verdict"]["parts"].get(name, 0.5) for name in parts}
    groups = [
        Group(prompt=prompt_at(ordinal), rollouts=tuple(map(make_rollout, group)))
        for ordinal, group in enumerate(drawn)
    ]
    brief = groups_of(group_arrays(groups, whole=[False] * len(groups)), prompt_at)

    def measured(groups):
        return rollout_metrics(
            Collected(groups=groups[:2], carry=groups[2:], sampled=groups, cursor=9, waves=1, surplus=0)
        )

    assert measured(brief) == measured(groups)


FLYING = {"rollout": RolloutConfig(in_flight=20, round_tokens=2)}
"""20 responses in flight, groups of four."""
CODE = {"waves": several.CHECKED + several.COMMAND, "flight": several.CHECKED + DELAYED}


@pytest.fixture(scope="module")
def settings(on_disk, tmp_path_factory):
    """Makes configurations for the command line, and writes them. In waves, three prompts of a wave are not shared evenly."""
    folder = tmp_path_factory.mktemp("several")
    (folder / "waves").mkdir()
    (folder / "flight").mkdir()
    return {
        "waves": on_disk(folder / "waves", GRADER, "eleventh"),
        "flight": partial(on_disk(folder / "flight", GRADER, "third"), **FLYING),
    }


@pytest.fixture(scope="module")
def alone(settings):
    """The run folder of one process with all eight devices, for each way of sampling; run when it is asked for."""

    @cache
    def run(how):
        config, _ = settings[how]("one", **({"sampling__slots": 24} if how == "flight" else {}))
        result = train(config, progress=Progress(config.steps, console=Console(quiet=True)))
        lines = result.metrics[1:]
        if how == "waves":
            assert max(line["rollout/waves"] for line in lines) > 1, "else no further wave is decided on"
            assert any(line["rollout/carried_groups"] for line in lines)
        else:
            assert any(line["rollout/age_max"] for line in lines)
        return result.run_dir

    return run


def trained(path, processes, *options, code=CODE["waves"]):
    return several.run(
        code, "train", path, *options, processes=processes, devices=8 // processes, within_s=900
    )


def assert_the_same(found, expected, *, steps=(2, 4)):
    """Compares two run folders: numbers of the host exactly, sums of devices up to rounding."""
    lines, wanted = read_metrics(found / "metrics.jsonl"), read_metrics(expected / "metrics.jsonl")
    assert [line["step"] for line in lines] == [line["step"] for line in wanted], lines
    for line, like in zip(lines, wanted, strict=True):
        assert like.keys() <= line.keys()  # a run that was to end at step 2 was evaluated there too
        for key in {key for key in like if not key.startswith(("time/", "speed/", "memory/"))}:
            exact = key.startswith(("rollout/", "reward/", "eval/")) and key not in FROM_LOGPROBS
            if exact or None in (line[key], like[key]):
                assert line[key] == like[key], (line["step"], key)
            else:
                assert math.isclose(line[key], like[key], rel_tol=1e-5, abs_tol=ROUNDING), (line["step"], key)
    for step in steps:
        read, like = (read_rollouts(run / "rollouts" / f"step_{step:06d}.jsonl") for run in (found, expected))
        for a, b in zip(read, like, strict=True):
            np.testing.assert_allclose(a.pop("logprobs"), b.pop("logprobs"), atol=1e-5)
            ratios, expected_ratios = a.pop("ratios"), b.pop("ratios")
            assert (ratios is None) == (expected_ratios is None)
            if ratios is not None:  # of two log-probabilities that are each as close
                np.testing.assert_allclose(
                    np.array(ratios, float), np.array(expected_ratios, float), rtol=2e-5
                )
            assert a == b
    last = f"step_{steps[-1]:06d}"
    [scored] = (expected / "evaluations" / last).iterdir()
    assert read_problems(found / "evaluations" / last / scored.name) == read_problems(scored)
    for a, b in zip(weights_of(found), weights_of(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


def weights_of(run):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_model(run / "model")[1])]


# Slow: runs of three processes in total. The test of rollouts in flight below compares two processes with one, too;
# tests/rollout/checkpoint_arrays_test.py has the arrays that they exchange.
@pytest.mark.slow
def test_two_processes_train_what_one_trains_in_waves(settings, alone):
    """With four slots each: of three prompts in a wave, each with four responses, one process has one and the other two."""
    _, path = settings["waves"]("two", sampling__slots=4)
    first, second = (output.rpartition("decode calls: ") for output in trained(path, 2, code=DELAYED))
    assert "step 4/4" in first[0]
    assert "step" not in second[0], "only the first one prints"
    assert int(first[2]) != int(second[2])  # each samples its own prompts until it has done, in no lockstep
    assert_the_same(path.with_name("two"), alone("waves"))
    for line in read_metrics(path.with_name("two") / "metrics.jsonl")[1:]:
        assert (line["time/wait_s"] > 0) == (line["rollout/prompts"] > 0)  # for the exchange of groups


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_what_one_trains_in_flight(processes, settings, alone):
    """Two share 20 as 10 and 10, in eight slots each; four as five each."""
    name = f"by_{processes}"
    _, path = settings["flight"](name, sampling__slots=8)
    trained(path, processes, code=DELAYED)
    assert_the_same(path.with_name(name), alone("flight"))


@pytest.mark.slow  # a run of several processes and a run of one
@pytest.mark.parametrize("how", CODE)
def test_several_processes_skip_the_same_solved_prompts(how, on_disk, tmp_path):
    """Responses end at a digit, because a truncated response ends a streak. Two processes of four slots have the eight slots of one."""
    (tmp_path / how).mkdir()
    config_of = on_disk(tmp_path / how, GRADER, "easy")
    flying = {"sampling__slots": 24, **FLYING} if how == "flight" else {}
    own = {"sampling__stop": list("0123456789"), "dynamic_sampling__skip_solved": 1, "steps": 6} | flying
    config, _ = config_of("one", **own)
    alone = train(config, progress=Progress(config.steps, console=Console(quiet=True)))
    assert alone.metrics[-1]["rollout/resting_frac"] > 0
    slots = 12 if how == "flight" else 4
    _, path = config_of("two", **own | {"sampling__slots": slots})
    trained(path, 2, code=CODE[how])
    assert_the_same(path.with_name("two"), alone.run_dir, steps=(2, 4, 6))


@pytest.mark.slow  # two runs of several processes each
@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("how", CODE)
def test_a_run_of_two_processes_resumes_with_one_and_with_four(how, processes, settings, alone):
    name = f"resumed_{processes}"
    _, path = settings[how](name)
    trained(path, 2, "steps=2", code=CODE[how])
    trained(path, processes, "--resume", code=CODE[how])
    assert_the_same(path.with_name(name), alone(how))


@pytest.mark.slow  # a run of several processes each
@pytest.mark.parametrize(
    ("name", "processes", "changes"),
    [
        ("shared", 4, {"parallel__sampler_hosts": 2}),
        ("shared_by_all", 2, {"parallel__sampler_hosts": 2}),
        ("spread", 2, {"parallel__data": 2, "parallel__sampler_tensor": 1, "sampling__slots": 4}),
    ],
)
@pytest.mark.parametrize("how", CODE)
def test_the_devices_of_samplers_change_nothing(how, settings, alone, name, processes, changes):
    _, path = settings[how](name, **changes)
    trained(path, processes, code=CODE[how])
    assert_the_same(path.with_name(name), alone(how))


@pytest.mark.slow  # two runs of several processes each
@pytest.mark.parametrize("fault", ["raise", signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("how", CODE)
def test_a_process_that_fails_ends_the_run_which_can_be_resumed(how, settings, alone, fault):
    """In waves, no checkpoint is due: all processes learn of the failure or the stop, and save together."""
    name = f"fails_{fault}"
    _, path = settings[how](name, checkpoint__keep_best=False)
    fails, run = path.with_name("fails_in"), path.with_name(name)
    saves = how == "waves" and fault != signal.SIGKILL
    due = ["checkpoint.every_steps=0"] if saves else []
    started = several.start(CODE[how], "train", path, *due, processes=2, devices=4)
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and '"step": 1,' in metrics.read_text()):
        assert started[0].poll() is None, started[0].communicate()
        time.sleep(0.1)
    if fault == "raise":
        fails.write_text("1")
    else:
        started[1].send_signal(fault)
    done = several.finish(started, within_s=60)
    fails.unlink(missing_ok=True)
    assert all(status not in (0, None) for status, _ in done), done
    if fault == "raise":
        assert "no verdict today" in done[0][1]
        assert "(process 1)" in done[0][1]
    if fault == signal.SIGTERM:
        assert [status for status, _ in done] == [STOPPED, STOPPED], done
        assert "stopped by SIGTERM (process 1); the last good checkpoint is from step" in done[0][1]
    saved = read_metrics(metrics)[-1]["step"]
    assert saved >= 1
    if saves:
        assert [int(kept.name) for kept in (run / "checkpoints").iterdir()] == [saved]
    trained(path, 2, "--resume", code=CODE[how])
    assert_the_same(run, alone(how))


@pytest.mark.slow
def test_machines_that_are_gone_are_followed_by_others_with_empty_disks(
    settings, alone, storage_server, tmp_path
):
    """Two processes are killed after the first checkpoint; four on another mesh resume from the bucket alone."""
    run, name = "gs://runs/several", "preempted"
    _, path = settings["waves"](name)
    storage_server.buckets["runs"].clear()

    def process(count, *options):
        disk = tmp_path / f"disk_{count}"
        disk.mkdir()
        options = [
            f"run_dir={run}",
            *options,
        ]
        return several.start(
            several.COMMAND,
            "train",
            path,
            *options,
            processes=count,
            devices=8 // count,
            HOME=str(disk),
            JAX_COMPILATION_CACHE_DIR="gs://runs/compiled",
        )

    started = process(2)
    while f"{run}/checkpoints/1/commit_success.txt" not in storage_server.files(run):
        assert started[1].poll() is None, started[1].communicate()
        time.sleep(0.1)
    for each in started:
        each.kill()
    several.finish(started, within_s=60)

    done = several.finish(process(4, "parallel.data=2", "--resume"), within_s=900)
    assert [status for status, _ in done] == [0] * 4, done
    for file, data in storage_server.files(run).items():
        kept = path.with_name(name) / file.removeprefix(f"{run}/")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
    assert_the_same(path.with_name(name), alone("waves"))
