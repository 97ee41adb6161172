"""Fixtures: Ray clusters on this machine."""

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cluster.engine_test import processes_of_ray


class TwoNodes:
    """A cluster of two nodes on two loopback addresses, whose ports other machines do not reach."""

    def __init__(self):
        self.before, self._frozen = processes_of_ray(), []
        cluster_class = pytest.importorskip("ray.cluster_utils", reason="needs the extra `cluster`").Cluster
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        sizes = {"num_cpus": 1, "num_gpus": 0, "resources": {"TPU": 1}, "object_store_memory": 80 << 20}
        self._cluster = cluster_class(True, head_node_args={"node_ip_address": "127.0.0.2", **sizes})
        self.address = self._cluster.address
        self.nodes = {"127.0.0.3": self._cluster.add_node(node_ip_address="127.0.0.3", **sizes)}

    def lose(self, address):
        """Kills all processes of a node."""
        self._cluster.remove_node(self.nodes.pop(address), allow_graceful=False)

    def freeze(self, address):
        """Stops all processes of a node, until `close`."""
        [raylet] = self.nodes[address].all_processes["raylet"]
        found = subprocess.run(["pgrep", "-P", f"{raylet.process.pid}"], capture_output=True, text=True)
        self._frozen = [raylet.process.pid, *map(int, found.stdout.split())]
        for process in self._frozen:
            os.kill(process, signal.SIGSTOP)

    def close(self):
        for process in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        self._cluster.shutdown()


@pytest.fixture
def two_nodes():
    with cluster() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def cluster_of_two():
    """A function that starts a cluster of two nodes and returns its address."""
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(cluster()).address


@contextlib.contextmanager
def cluster():
    """A cluster of two nodes. Other workers of pytest wait for its end, because tests look for processes that are left on this machine."""
    with open(Path(tempfile.gettempdir()) / "dapo_jax_tests_cluster.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        nodes = TwoNodes()
        yield nodes
        import ray

        ray.shutdown()
        with contextlib.suppress(Exception):
            nodes.close()
