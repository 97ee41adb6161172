"""The tests of workers of this machine hold for workers on the nodes of a cluster: verdicts, messages, deaths, time limits and replays."""

from functools import partial

import pytest

from dapo_jax.cluster.engine import Cluster
from dapo_jax.cluster.remote_worker import Places, RemoteWorker
from dapo_jax.environments.worker_environment import WorkerEnvironment
from dapo_jax.rewards.grading_pool import GradingPool
from tests.cluster.threads import ThreadCluster
from tests.environments import worker_environment_test as environments
from tests.environments.worker_environment_test import scripted as scripted
from tests.rewards import grading_pool_test as pools

# Slow: both files again, and each worker is an actor. tests/cluster/remote_worker_test.py has quick tests.
pytestmark = pytest.mark.slow

# These start interpreters of their own, whose workers are on this machine, count threads of this process, or bring their own kind of worker.
LOCAL = {
    "test_a_death_before_the_answer_to_the_call_before_was_read_is_counted",
    "test_a_busy_worker_ends_with_a_trainer_that_is_killed",
    "test_modules_of_the_current_folder_shadow_no_module_of_python_or_this_package",
}
for module in (pools, environments):
    found = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    globals().update({name: test for name, test in found.items() if name not in LOCAL})


@pytest.fixture(autouse=True)
def patched_here_alone(request):
    """A limit that a test changes in this process is not changed in an actor of Ray."""
    if "within 0" in request.node.name and "ray" in request.node.name:
        pytest.skip("the actor has its own limit")


@pytest.fixture(scope="module", params=["threads", "ray"], autouse=True)
def on_nodes(request, cluster_of_two):
    """Starts the workers of both files on two nodes: threads of this process, or nodes of Ray."""
    cluster = ThreadCluster() if request.param == "threads" else Cluster(cluster_of_two())
    worker = partial(RemoteWorker, Places(cluster))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "GradingPool", partial(GradingPool, worker=worker))
        patch.setattr(environments, "WorkerEnvironment", partial(WorkerEnvironment, worker=worker))
        yield
    cluster.close()
