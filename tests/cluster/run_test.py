"""Runs whose graders and environment work on the nodes of a cluster are the runs of one machine."""

import subprocess
from functools import partial

import pytest

from dapo_jax.cluster.remote_worker import RemoteWorker
from dapo_jax.config import ClusterConfig, ConfigError, TrainConfig
from dapo_jax.run import build
from dapo_jax.workers import Worker
from tests.cluster.threads import ThreadCluster
from tests.faults.micro import assert_the_same_run, make_run


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
    """Graders, and the environment `guess`; at the end, only the cluster's own processes are left."""
    environment = [
        "environment.source=guess",
        "reward.grader=exact",
        "dynamic_sampling.enabled=false",
        "sampling.batch_invariant=true",
    ]
    for name, options in (("graders", []), ("environment", environment)):
        here, there = (make_run(tmp_path / name / place, steps=4) for place in ("here", "there"))
        here.finish(*options, "workers.count=2")
        there.finish(
            *options, "workers.count=3", f"cluster.address={two_nodes.address}", "cluster.workers=true"
        )
        assert_the_same_run(there.run_dir, here.run_dir)
    left = subprocess.run(["pgrep", "-fa", "workers.inside|_Inside"], capture_output=True, text=True)
    assert str(tmp_path) not in left.stdout
    assert "_Inside" not in left.stdout
