"""A run whose sample workers are processes on two nodes of a Ray cluster, which are killed and frozen."""

import os
import random
import signal
import subprocess
from dataclasses import replace

import pytest

from dapo_jax.cluster.remote_rounds import RemoteRounds
from tests.cluster.conftest import two_nodes
from tests.cluster.engine_test import processes_of_ray
from tests.rollout.sample_workers_test import flying

__all__ = ["flying", "two_nodes"]

pytestmark = pytest.mark.slow  # starts Ray, which takes 10 to 30 s, and processes that compile the sampler


def workers_of_this_process():
    """The processes of Ray actors below this process."""
    lines = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in lines.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, *_ in rows}

    def is_below(pid):
        while pid in parents:
            if (pid := parents[pid]) == os.getpid():
                return True
        return False

    return [
        int(pid)
        for pid, _, *args in rows
        if args and args[0].startswith("ray::_Inside") and is_below(int(pid))
    ]


def without_cluster(run):
    return replace(
        run, metrics=[{n: v for n, v in line.items() if not n.startswith("cluster/")} for line in run.metrics]
    )


@pytest.mark.parametrize(("number", "lag"), [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 1)])
def test_processes_on_two_nodes_that_are_killed_or_frozen_change_no_bit(
    number, lag, flying, run_micro, same_run, rows, two_nodes, monkeypatch
):
    """A signal to a random worker in every second round. Ray does not notice a frozen process, but our limit of 2 s does."""
    expected = run_micro(flying(rollout__weight_rounds=lag), eval_rows=rows)
    ask, dice, killed = RemoteRounds._ask, random.Random(lag), {}

    def asked(self, *arguments):
        answer = ask(self, *arguments)
        if self._workers.number % 2 == 0 and self._workers.number not in killed:
            killed[self._workers.number] = pid = dice.choice(sorted(workers_of_this_process()))
            os.kill(pid, number)
        return answer

    monkeypatch.setattr(RemoteRounds, "_ask", asked)
    ours = {
        "cluster__address": two_nodes.address,
        "cluster__round_s": 2.0 if number == signal.SIGSTOP else 60.0,
    }
    config = flying(workers=2, rollout__weight_rounds=lag, **ours)
    found = run_micro(config, eval_rows=rows)
    same_run(without_cluster(found), expected)
    replaced = found.metrics[-1]["cluster/replaced"]
    # With the limit of 2 s, a busy machine may cost further processes.
    assert replaced > 0 if number == signal.SIGSTOP else 0 < replaced <= len(killed)
    assert not workers_of_this_process()
    two_nodes.close()
    assert processes_of_ray() <= two_nodes.before
