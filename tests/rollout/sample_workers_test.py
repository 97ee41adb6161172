"""Runs with sample workers in threads: bit for bit the run in one process, whatever dies and however slow they are."""

import random
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from rich.console import Console

from dapo_jax.cluster.sample_worker import SampleWorker
from dapo_jax.config import ClusterConfig, ConfigError, LoraConfig
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.doctor.tiny_step import reduced
from dapo_jax.run import build, meshes, sample_workers
from dapo_jax.run.observers import StepProgress
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.rollout_log import read_rollouts
from dapo_jax.training.update import Updater
from tests.cluster.threads import ThreadCluster
from tests.run.conftest import without_evaluations
from tests.run.turns_test import ENVIRONMENT, with_turns

STEPS = 4


@pytest.fixture(scope="module")
def flying(micro, moe_model, tmp_path_factory):
    """Makes configurations with 16 responses in flight, in rounds of 2 tokens; with `workers`, they sample."""
    place = tmp_path_factory.mktemp("environment")
    (place / "sums.py").write_text(ENVIRONMENT)
    kinds = {
        "plain": {},
        "lora": {"lora": LoraConfig(rank=2)},
        "experts": {"model__source": moe_model},
        "episodes": with_turns(place, {}),
    }

    def make(run_dir=None, *, kind="plain", workers=0, **changes):
        own = {
            "rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 64, "optimizer__epsilon": 0.1,
            "sampling__batch_invariant": True, "steps": STEPS, "checkpoint__every_steps": 1, "checkpoint__keep": 9,
            "log__rollouts_every_steps": 1,
        }  # fmt: skip
        if workers:
            own["cluster"] = ClusterConfig(address="auto", samplers=workers, resources={"CPU": 1})
        return micro(run_dir, **own | kinds[kind] | changes)

    return make


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of threads for the runs of a test. A sample worker has one device."""
    clusters = []

    def made(address):
        clusters.append(ThreadCluster(nodes=5, resources={"CPU": 1.0}))
        return clusters[-1]

    monkeypatch.setattr(build, "Cluster", made)
    one = partial(meshes.meshes_of, devices=jax.devices()[:1])
    monkeypatch.setattr(sample_workers, "meshes_of", one)
    yield clusters
    assert all(not one._actors for one in clusters), "no worker outlives its run"


@pytest.fixture
def chance(monkeypatch):
    """Delays each round of a worker, and each update, by 0 to 100 ms. Ends a worker before a round, or before it begins with new weights, with the probability `kills`. The
    repetition of the same call is spared, because three failures in a row end a run."""
    draw, begin, update, dice = SampleWorker.draw, SampleWorker.begin, Updater.update, random.Random(0)
    dice.kills, dice.clusters, dice.killed, seen = 0.0, (), 0, set()

    def later(function, self, *arguments, **options):
        time.sleep(dice.uniform(0, 0.1))
        if isinstance(self, SampleWorker):
            call = len(dice.clusters), function.__name__, str(arguments[:2]), str(arguments[4:5])
            if call not in seen and dice.random() < dice.kills:
                dice.killed += 1
                next(a for a in dice.clusters[-1]._actors if a.object is self).kill()
            seen.add(call)
        return function(self, *arguments, **options)

    for owner, function in ((SampleWorker, draw), (SampleWorker, begin), (Updater, update)):
        monkeypatch.setattr(owner, function.__name__, lambda *a, f=function, **o: later(f, *a, **o))
    return dice


@pytest.fixture
def same(same_run):
    """Asserts that two runs have the same metrics except of time and of the cluster, rollouts and weights, bit for bit."""

    def check(found, expected):
        same_run(found, expected)
        for step in range(1, STEPS + 1):
            paths = [run.run_dir / "rollouts" / f"step_{step:06d}.jsonl" for run in (found, expected)]
            assert read_rollouts(paths[0]) == read_rollouts(paths[1])

    return check


# Slow: three runs and two sizes of the sampler each, half a minute. tests/cluster/remote_rounds_test.py has the same without a model.
@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("kind", ["plain", "lora", "experts", "episodes"])
def test_sample_workers_change_no_bit(kind, lag, flying, run_micro, same, cluster, chance, rows):
    """One process equals two workers. It also equals three workers with other slots, although one round in ten ends a worker's process."""
    make, how = partial(flying, kind=kind, rollout__weight_rounds=lag), {"eval_rows": rows}
    how |= {"reward": None} if kind == "episodes" else {}
    expected = run_micro(make(), **how)
    assert any(line["rollout/age_max"] for line in expected.metrics[1:])
    same(run_micro(make(workers=2), **how), expected)
    chance.kills, chance.clusters = 0.1, cluster
    found = run_micro(make(workers=3, sampling__slots=128), **how)
    same(found, expected)
    assert found.metrics[-1]["cluster/replaced"] == chance.killed > 0


# Slow: five runs.
@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "episodes"])
def test_a_run_resumes_with_any_number_of_workers(kind, lag, flying, run_micro, same, cluster, rows):
    make, how = partial(flying, kind=kind, rollout__weight_rounds=lag), {"eval_rows": rows}
    how |= {"reward": None} if kind == "episodes" else {}
    expected, folder = run_micro(make(), **how), flying().run_dir
    for last in range(1, STEPS + 1):
        found = run_micro(make(folder, steps=last, workers=last % 3), resume=last > 1, **how)
    parted = [replace(run, metrics=without_evaluations(run.metrics)) for run in (found, expected)]
    same(*parted)


# Slow: two runs. The tokens are the same; log-probabilities depend on the batch, by rounding.
@pytest.mark.slow
def test_without_batch_invariance_the_tokens_of_the_first_step_are_the_same(
    flying, run_micro, cluster, chance, rows
):
    """After the first update, the weights differ by rounding."""
    make = partial(flying, sampling__batch_invariant=False, steps=1)
    expected = run_micro(make())
    chance.kills, chance.clusters = 0.5, cluster
    found = run_micro(make(workers=3))
    assert found.metrics[-1]["cluster/replaced"] == chance.killed > 0
    read = [read_rollouts(run.run_dir / "rollouts" / "step_000001.jsonl") for run in (found, expected)]
    for row, other in zip(*read, strict=True):
        assert row["response_token_ids"] == other["response_token_ids"]


# Slow: a run of its own shapes.
@pytest.mark.slow
def test_further_rounds_are_sampled_with_the_weights_of_their_step(flying, run_micro):
    """A step's chosen groups have no token of its further rounds: the newest token of a group that was ready then is a version older than the step. A step that needs no
    further round is reported once."""
    run = run_micro(flying(rollout__weight_rounds=3, sampling__batch_invariant=False, sampling__slots=16))
    for step in range(1, STEPS + 1):
        for row in read_rollouts(run.run_dir / "rollouts" / f"step_{step:06d}.jsonl"):
            assert max(version for _, version in row["spans"]) < step
    assert all(line["rollout/rounds"] >= 3 for line in run.metrics)


def test_the_run_warns_once_if_the_further_rounds_are_enough(flying):
    shown, told = Progress(2, console=Console(quiet=True)), []
    shown.message = told.append
    watched = StepProgress(flying(rollout__weight_rounds=3), shown)
    for step, rounds in ((1, 4), (2, 0), (3, 0)):
        collected = Collected(groups=[], carry=[], sampled=[], cursor=0, waves=0, surplus=0, rounds=rounds)
        watched.after_sampling(step, collected)
    assert len(told) == 1
    assert told[0].startswith("step 2 needed no round of its own after the rollout.weight_rounds=3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__in_flight": 0, "rollout__round_tokens": 256}, "cluster.samplers: found 2, needs a value of rollout.in_flight"),
        ({"parallel__sampler_hosts": 2}, "parallel.sampler_hosts: found 2, needs 1 with cluster.samplers"),
        ({"cluster__resources": {"GPU": 0}}, "cluster.resources: found {'GPU': 0}, needs a whole number of 1 or more for GPU"),
        ({"cluster__address": "", "cluster__resources": {}}, "cluster.samplers: found 2, needs cluster.address"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused(changes, message, flying):
    with pytest.raises(ConfigError, match=message):
        flying(workers=2, **changes)


OWN = {"platform": "gpu", "device": "H100", "devices": "8", "chips": "one: 0, 1, 2, 3"}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"chips": "one: 3"}, "has the devices one: 3, but this process trains on one: 0, 1, 2, 3"),
        ({"chips": "two: 3", "devices": "2"}, r"has 2 x gpu, but cluster.resources=\{'GPU': 1\} gives it 1 x gpu"),
        ({"chips": "two: 3", "platform": "cpu"}, "has 1 x cpu, but .* gives it 1 x gpu: install jax"),
        ({"chips": "two: 3"}, ""),
        ({"chips": "one: 4"}, ""),
    ],
)  # fmt: skip
def test_devices_that_a_worker_must_not_have_are_refused(found, message):
    check = partial(sample_workers.check_devices, OWN, OWN | {"devices": "1"} | found, {"GPU": 1}, "w")
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check()


def test_the_doctors_tiny_step_samples_on_this_machine(flying):
    prompt = Prompt(ordinal=0, text="", answer="", tokens=np.array([3, 4], np.int32))
    config = reduced(flying(workers=2), [prompt])
    assert (config.cluster, config.rollout.in_flight) == (ClusterConfig(), 4)
