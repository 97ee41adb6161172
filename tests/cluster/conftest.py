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

    def __init__(self, store_mb=80):
        self.before, self._frozen = processes_of_ray(), []
        cluster_class = pytest.importorskip("ray.cluster_utils", reason="needs the extra `cluster`").Cluster
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._sizes = {
            "num_cpus": 1,
            "num_gpus": 0,
            "resources": {"TPU": 1},
            "object_store_memory": store_mb << 20,
        }
        head = {"node_ip_address": "127.0.0.2", **self._sizes}
        self._cluster, self._started, self.nodes = cluster_class(True, head_node_args=head), 2, {}
        self.address, self.head = self._cluster.address, self._cluster.head_node
        self.add()

    def add(self):
        """Starts a further node."""
        self._started += 1
        address = f"127.0.0.{self._started}"
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # otherwise it works in the main thread alone, and replaces the handler of a run
            patch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)
            self.nodes[address] = self._cluster.add_node(node_ip_address=address, **self._sizes)

    def lose(self, address):
        """Kills all processes of a node at once."""
        node = self.nodes.pop(address)
        self._signal(node, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_head(self):
        """Kills all processes of the head at once."""
        [control] = self.head.all_processes["gcs_server"]
        control.process.kill()
        self._signal(self.head, signal.SIGKILL)

    def freeze(self, address):
        """Stops all processes of a node, until `thaw` or `close`."""
        self._frozen += self._signal(self.nodes.pop(address), signal.SIGSTOP)

    def _signal(self, node, number):
        """Sends a signal to the process that serves a node, and to its children. Returns their ids."""
        [raylet] = node.all_processes["raylet"]
        found = subprocess.run(["pgrep", "-P", f"{raylet.process.pid}"], capture_output=True, text=True)
        processes = [raylet.process.pid, *map(int, found.stdout.split())]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        return processes

    def thaw(self):
        for process in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def close(self):
        self.thaw()
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
def cluster(**options):
    """A cluster of two nodes. Other workers of pytest wait for its end, because tests look for processes that are left on this machine."""
    with open(Path(tempfile.gettempdir()) / "dapo_jax_tests_cluster.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        nodes = TwoNodes(**options)
        yield nodes
        import ray

        ray.shutdown()
        with contextlib.suppress(Exception):
            nodes.close()
