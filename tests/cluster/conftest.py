"""Fixtures: a Ray cluster on this machine."""

import contextlib

import pytest

from tests.cluster.engine_test import processes_of_ray


class TwoNodes:
    """A cluster of two nodes on two loopback addresses, whose ports other machines do not reach."""

    def __init__(self, cluster_class):
        self.before = processes_of_ray()
        sizes = {"num_cpus": 1, "num_gpus": 0, "resources": {"TPU": 1}, "object_store_memory": 80 << 20}
        self._cluster = cluster_class(True, head_node_args={"node_ip_address": "127.0.0.2", **sizes})
        self.address = self._cluster.address
        self._nodes = {"127.0.0.3": self._cluster.add_node(node_ip_address="127.0.0.3", **sizes)}

    def lose(self, address):
        """Kills all processes of a node."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def close(self):
        self._cluster.shutdown()


@pytest.fixture
def two_nodes(monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs the extra `cluster`")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes = TwoNodes(cluster_utils.Cluster)
    yield nodes
    import ray

    ray.shutdown()
    with contextlib.suppress(Exception):
        nodes.close()
