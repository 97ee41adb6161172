"""Runs whose graders and environment work on the nodes of a cluster are the runs of one machine."""

import re
import signal
import subprocess
import time
from functools import partial

import pytest

from dapo_jax.cluster.remote_worker import RemoteWorker
from dapo_jax.config import ClusterConfig, ConfigError, TrainConfig
from dapo_jax.rewards.code_grader import VERDICTS
from dapo_jax.run import build
from dapo_jax.trackers.rollout_log import read_rollouts
from dapo_jax.workers import Worker
from tests.cluster.threads import ThreadCluster
from tests.faults.code_kill_test import OPTIONS as CODE
from tests.faults.micro import assert_the_same_run, make_run
from tests.sandbox.running import run as sandboxed


def test_the_configured_cluster_starts_the_workers(monkeypatch):
    asked = []
    monkeypatch.setattr(build, "Cluster", lambda address: asked.append(address) or ThreadCluster())
    assert build._connected(TrainConfig(run_dir="run")) == (None, Worker)
    config = TrainConfig(run_dir="run", cluster=ClusterConfig(address="head:6379", workers=True))
    cluster, worker = build._connected(config)
    assert asked == ["head:6379"]
    assert isinstance(worker, partial)
    assert (worker.func, worker.args[0].cluster) == (RemoteWorker, cluster)


def test_no_connection_is_an_error_of_the_configuration(monkeypatch):
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    config = TrainConfig(run_dir="run", cluster=ClusterConfig(address="192.0.2.7:6379", workers=True))
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        build._connected(config)


# Slow: starts a cluster of two nodes, and three runs.
@pytest.mark.slow
def test_a_run_on_a_cluster_is_the_run_of_one_machine(two_nodes, tmp_path):
    """Graders, the environment `guess`, and the grader `code` together with a grader on the nodes; at the end, only the cluster's own processes are left."""
    sandboxed("pass")  # skips without bubblewrap
    environment = [
        "environment.source=guess",
        "reward.grader=exact",
        "dynamic_sampling.enabled=false",
        "sampling.batch_invariant=true",
    ]
    for name, options in (("graders", []), ("environment", environment), ("code", CODE)):
        here, there = (make_run(tmp_path / name / place, steps=4) for place in ("here", "there"))
        ours = ["workers.count=3", f"cluster.address={two_nodes.address}", "cluster.workers=true"]
        for run, how in ((here, ["workers.count=2"]), (there, ours)):
            how += ["log.rollouts_every_steps=1"]
            if name == "code":
                parts = f'[{{grader: code, weight: 1.0}}, {{grader: "{run.folder}/grader.py:seventh", weight: 0.5}}]'
                how += [f"reward.grader={parts}"]
            run.finish(*options, *how)
        assert_the_same_run(there.run_dir, here.run_dir)
        assert verdicts(there) == verdicts(here)
    assert all(row["reason"] for row in verdicts(there))
    assert left_of(tmp_path) == []


def verdicts(run):
    """The saved responses of four steps. A reason also has a folder or a time; its names of verdicts are kept."""
    rows = [read_rollouts(run.run_dir / "rollouts" / f"step_{step:06d}.jsonl") for step in range(1, 5)]
    return [row | {"reason": re.findall("|".join(VERDICTS), row["reason"])} for step in rows for row in step]


# Slow: starts a cluster of two nodes, and four runs.
@pytest.mark.slow
def test_a_trainer_that_was_killed_or_stopped_resumes_on_the_cluster(two_nodes, tmp_path):
    """Ray ends the workers of a killed trainer. SIGTERM saves a checkpoint, although ray has its own handler."""
    here, there = (make_run(tmp_path / place, steps=200) for place in ("here", "there"))
    options = ["--resume", "workers.count=2", f"cluster.address={two_nodes.address}", "cluster.workers=true"]
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)):
        process, before = there.start(*options), max(there.steps(), default=0)
        there.wait_for(process, lambda before=before: max(there.steps(), default=0) > before + 2)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == status, output
        assert max(there.steps()) < 200
        until = time.monotonic() + 30
        while left_of(tmp_path) and time.monotonic() < until:
            time.sleep(0.1)
        assert left_of(tmp_path) == []
    there.finish(*options)
    here.finish("workers.count=2")
    assert_the_same_run(there.run_dir, here.run_dir)


def left_of(folder):
    """The processes of workers whose grader is in a folder, and all actors."""
    found = subprocess.run(["pgrep", "-fa", "workers.inside|_Inside"], capture_output=True, text=True)
    lines = found.stdout.splitlines()
    return [line for line in lines if "_Inside" in line or f"{folder}" in line]
