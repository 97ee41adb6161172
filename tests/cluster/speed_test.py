"""The time of many short calls on two nodes, next to workers of this machine."""

import time
from functools import partial
from pathlib import Path

import pytest

from dapo_jax.cluster.engine import Cluster
from dapo_jax.cluster.remote_worker import Places, RemoteWorker
from dapo_jax.rewards.grading_pool import GradingPool
from dapo_jax.workers import Worker
from tests.rewards.samples import sample


def a_millisecond(one):
    """A reward function that takes 1 ms."""
    time.sleep(1e-3)
    return one.response == one.answer


def seconds_of(worker):
    """The time of 1,000 calls, in groups of 16, on two workers that have begun; the best of five."""
    pool = GradingPool(
        f"{Path(__file__)}:a_millisecond", workers=2, timeout_s=60.0, memory_mb=512, worker=worker
    )
    groups = [[sample(f"{n}", answer="3") for n in range(16)] for _ in range(63)]
    pool.submit(groups[0] * 4).result()
    found = []
    for _ in range(5):
        start = time.perf_counter()
        asked = [pool.submit(group) for group in groups]
        verdicts = [verdict.correct for future in asked for verdict in future.result()]
        found.append(time.perf_counter() - start)
        assert verdicts == [n == 3 for n in range(16)] * 63
    pool.close()
    return min(found)


# Slow: starts a cluster of two nodes.
@pytest.mark.slow
def test_short_calls_take_at_most_1_3_times_as_long_as_on_this_machine(two_nodes):
    """16 calls share the time of two messages, about 1 ms each, so a call of 1 ms becomes at most 1 + 2 / 16 = 1.13 ms; the rest is for noise."""
    here = seconds_of(Worker)
    cluster = Cluster(two_nodes.address)
    there = seconds_of(partial(RemoteWorker, Places(cluster)))
    cluster.close()
    print(f"1,008 calls of 1 ms: {here:.2f} s on this machine, {there:.2f} s on two nodes")
    assert there <= 1.3 * here
