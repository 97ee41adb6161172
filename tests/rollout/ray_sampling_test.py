"""A run whose sample workers and graders are processes on the nodes of a Ray cluster: they, their nodes, the trainer and the head are killed and frozen."""

import os
import random
import signal
import subprocess
import time

import pytest

from dapo_jax.cluster.remote_rounds import _Worker
from dapo_jax.trackers import read_metrics
from tests.cluster.conftest import cluster, two_nodes
from tests.cluster.engine_test import processes_of_ray, within_s
from tests.cluster.run_test import left_of
from tests.faults.kill_test import IN_FLIGHT
from tests.faults.micro import GRADER, assert_the_same_run, make_run
from tests.rollout.sample_workers_test import flying

__all__ = ["flying", "two_nodes"]

pytestmark = pytest.mark.slow  # starts Ray, which takes 10 to 30 s, and processes that compile the sampler

KILLS = int(os.environ.get("DAPO_JAX_KILLS", 2))
"""Number of kills or stops in each test."""


def processes():
    """The id of each process, with its parent's id and its command."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in lines.stdout.splitlines()]
    return {int(pid): (int(parent), *command) for pid, parent, *command in rows}


def actors(*, grading):
    """The processes of Ray actors below this process: sample workers, or hosts of graders with their workers."""
    found, hosts = processes(), {}

    def is_below(pid):
        while pid in found:
            if (pid := found[pid][0]) == os.getpid():
                return True
        return False

    for pid, (_, *command) in found.items():
        if command and command[0].startswith("ray::_Inside") and is_below(pid):
            hosts[pid] = [
                one
                for one, (parent, *line) in found.items()
                if parent == pid and "workers.inside" in str(line)
            ]
    return [one for pid, below in hosts.items() if bool(below) == grading for one in (pid, *below)]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("way", ["round", "weights", "grader", "node", "stopped", "frozen"])
def test_what_is_killed_or_frozen_changes_no_bit(
    way, lag, flying, run_micro, same_run, rows, two_nodes, monkeypatch, tmp_path
):
    """At random moments after calls to a sample worker, at most once in each step. Ray never notices a process that was stopped, and a frozen node after 64 s.
    Our limit is 3 s."""
    (tmp_path / "grader.py").write_text(GRADER)
    grader = f"{tmp_path}/grader.py:seventh"
    own = {
        "rollout__weight_rounds": lag,
        "reward__grader": grader,
        "workers__count": 2,
        "steps": 2 * KILLS + 2,
    }
    expected = run_micro(flying(**own), reward=None, eval_rows=rows)
    send, dice, lost = _Worker.send, random.Random(f"{way} {lag}"), []
    calls = ("take", "begin") if way == "weights" else ("draw",)

    def sent(self, *call):
        answer = send(self, *call)
        if call[0] in calls and call[1] not in lost and len(lost) < KILLS and dice.random() < 0.5:
            time.sleep(dice.choice([0.0, 0.003, 0.03]))
            lost.append(call[1])
            if way == "node":
                two_nodes.lose(*two_nodes.nodes)
                two_nodes.add()
            elif way == "frozen":
                two_nodes.freeze(*two_nodes.nodes)
                two_nodes.add()
            else:
                number = signal.SIGSTOP if way == "stopped" else signal.SIGKILL
                os.kill(dice.choice(sorted(actors(grading=way == "grader"))), number)
        return answer

    monkeypatch.setattr(_Worker, "send", sent)
    slow = way in ("stopped", "frozen")
    ours = {
        "cluster__address": two_nodes.address,
        "cluster__workers": True,
        "cluster__round_s": 3.0 if slow else 120.0,
    }
    found = run_micro(flying(workers=2, **own, **ours), reward=None, eval_rows=rows)
    same_run(found, expected)
    replaced = found.metrics[-1]["cluster/replaced"]
    print(f"{way}, {lag}: {len(lost)} kills or stops, {replaced} replaced")
    assert len(lost) == KILLS
    # With the limit of 3 s, a busy machine may cost further processes.
    assert replaced >= KILLS if slow else replaced == (0 if way == "grader" else KILLS)
    two_nodes.thaw()
    within_s(60, lambda: not actors(grading=False) + actors(grading=True))
    two_nodes.close()
    within_s(60, lambda: processes_of_ray() <= two_nodes.before)


@pytest.mark.parametrize("victim", ["trainer", "head"])
def test_a_run_resumes_after_a_kill_of_the_trainer_or_of_the_clusters_head(victim, tmp_path):
    """At a random moment after it has saved a further step."""
    here, there = (make_run(tmp_path / place, steps=60 * KILLS) for place in ("here", "there"))
    options = [
        "--resume",
        *IN_FLIGHT,
        "sampling.batch_invariant=true",
        "workers.count=2",
        "rollout.weight_rounds=1",
    ]
    ours = ["cluster.workers=true", "cluster.samplers=2", "cluster.resources={CPU: 1}"]
    dice, statuses = random.Random(0), []
    before = processes_of_ray()
    for kill in range(KILLS + 1):
        with cluster() as nodes:
            on_it = [*options, *ours, f"cluster.address={nodes.address}"]
            if kill == KILLS:
                reached = max(there.steps()) + 3
                there.finish(*on_it, f"steps={reached}")
                continue
            saved, process = max(there.steps(), default=0), there.start(*on_it)
            there.wait_for(process, lambda saved=saved: max(there.steps(), default=0) > saved, within_s=300)
            time.sleep(dice.uniform(0, 0.5))
            assert process.poll() is None, "it has finished: too few steps for so many kills"
            process.kill() if victim == "trainer" else nodes.lose_head()
            process.communicate(timeout=180)
            statuses.append(process.returncode)
            within_s(180, lambda: not left_of(tmp_path))  # a node notices the death of the head after 60 s
    assert statuses == [-signal.SIGKILL if victim == "trainer" else 1] * KILLS
    within_s(60, lambda: processes_of_ray() <= before)
    here.finish(*options, f"steps={reached}")
    assert_the_same_run(there.run_dir, here.run_dir)
    assert read_metrics(there.run_dir / "metrics.jsonl")[-1]["cluster/replaced"] == 0
