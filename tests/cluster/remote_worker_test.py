"""Workers on nodes, on a double of the cluster: nodes that are lost or frozen, calls that are sent together, files and versions that differ."""

import sys
import time
from contextlib import closing
from functools import partial

import pytest

from dapo_jax.cluster import remote_worker
from dapo_jax.cluster.engine import Cluster, Node
from dapo_jax.cluster.remote_worker import Places, RemoteWorker, WorkerHost, user_files
from dapo_jax.environments.worker_environment import WorkerEnvironment
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.grading_pool import GradingPool
from dapo_jax.rewards.sample import call_of
from dapo_jax.workers import EndedError
from tests.cluster.threads import ThreadCluster
from tests.environments import worker_environment_test as episodes_of_workers
from tests.environments.scripted import Scripted
from tests.rewards.grading_pool_test import HOSTILE, sample, samples

GRADER = f"{HOSTILE}:hostile"


@pytest.fixture
def cluster():
    with closing(ThreadCluster()) as opened:
        yield opened


def pool(cluster, *, workers=1, grader=GRADER, timeout_s=5.0):
    worker = partial(RemoteWorker, Places(cluster))
    return closing(GradingPool(grader, workers=workers, timeout_s=timeout_s, memory_mb=128, worker=worker))


def once_begun(cluster, count=1):
    """Waits until so many workers have loaded their grader, and returns their actors."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        begun = [actor for actor in cluster.started if actor.object._worker.ready.done()]
        if len(begun) >= count:
            return begun
        time.sleep(0.01)
    raise AssertionError("no worker began")


def test_workers_are_spread_and_calls_are_sent_together(cluster, monkeypatch):
    sent = []
    ask = WorkerHost.ask
    monkeypatch.setattr(WorkerHost, "ask", lambda host, lines: sent.append(len(lines)) or ask(host, lines))
    with pool(cluster, workers=2) as grading:
        once_begun(cluster, 2)
        verdicts = grading.submit(samples("34", *map(str, range(99)))).result(60)
        assert [verdict.correct for verdict in verdicts] == [True, *(n == 34 for n in range(99))]
        assert {actor.node.address for actor in cluster.started} == {"10.0.0.1", "10.0.0.2"}
    assert sum(sent) == 100
    # A worker gets its share of the waiting calls, at most 16: two times 16 of 100, and so on. Two messages for each call would be 100.
    assert len(sent) <= 40
    assert all(actor.died for actor in cluster.started)


def test_the_calls_of_a_lost_node_are_repeated_once_on_another_node(cluster, capfd):
    with pool(cluster) as grading:
        [lost] = once_begun(cluster)
        asked = grading.submit(samples("slow", "34", answer="slow"))
        time.sleep(0.2)  # the first call lasts 0.4 s
        cluster.lose(lost.node)
        assert [verdict.correct for verdict in asked.result(60)] == [True, False]
        assert [actor.node.address for actor in cluster.started] == ["10.0.0.1", "10.0.0.2"]
        assert grading.grade([sample("34")])[0].correct
    assert capfd.readouterr().err.count("its node died; retrying on a new worker") == 1


# Slow: three workers in turn.
@pytest.mark.slow
def test_lost_nodes_are_no_deaths_of_the_grader(cluster):
    """Three deaths in three calls would be an error of the grader."""
    with pool(cluster, workers=1) as grading:
        for number in range(1, 4):
            actor = once_begun(cluster, number)[-1]
            asked = grading.submit([sample("slow", answer="slow")])
            time.sleep(0.1)
            actor.die("its node died")
            assert asked.result(60)[0].correct


def test_the_calls_of_a_frozen_node_are_repeated_once_on_another_node(cluster, monkeypatch):
    """The node has been silent for more than three polls of 0.1 s when the time of the call ends."""
    monkeypatch.setattr(remote_worker, "_POLL_S", 0.1)
    with pool(cluster, timeout_s=1.0) as grading:
        [frozen] = once_begun(cluster)
        cluster.freeze(frozen.node)
        assert grading.grade([sample("34")])[0].correct
        assert cluster.started[-1].node != frozen.node
        cluster.moving[frozen.node.id].set()


def test_a_worker_has_ended_before_its_calls_raise(cluster):
    """Otherwise a call would be retried on the worker that died."""
    setup, seen = {"grader": GRADER, "answer_marker": "="}, []
    load = "dapo_jax.rewards.grading_pool:load_grader"
    worker = RemoteWorker(Places(cluster), load, setup, memory_mb=128)
    worker.ready.result(20)
    asked = worker.ask({"samples": call_of([sample("exit")])})
    asked.add_done_callback(lambda _: seen.append(worker.ended is not None))
    with pytest.raises(EndedError, match="exit status 3"):
        asked.result(20)
    assert seen == [True]
    worker.join()


# Slow, because tests/cluster/same_rules_test.py has it, too.
@pytest.mark.slow
def test_a_call_that_hangs_on_a_node_that_answers_is_lost_as_ever(cluster):
    with pool(cluster, timeout_s=0.5) as grading:
        once_begun(cluster)
        [verdict] = grading.grade([sample("hang")])
        assert (verdict.lost, verdict.reason) == ("timeout", "no verdict within 0.5 s")


# Slow: waits for the silence.
@pytest.mark.slow
def test_a_silent_node_is_lost_before_the_time_of_a_long_call_ends(cluster, monkeypatch):
    monkeypatch.setattr(remote_worker, "SILENT_S", 1.5)
    with pool(cluster, timeout_s=600.0) as grading:
        [frozen] = once_begun(cluster)
        cluster.freeze(frozen.node)
        assert grading.submit([sample("34")]).result(20)[0].correct
        cluster.moving[frozen.node.id].set()


def test_other_versions_and_files_are_refused(cluster):
    cluster.facts = {"numpy": "1.0", str(HOSTILE): "no such file"}
    with pool(cluster) as grading, pytest.raises(ValueError, match=r"numpy is .* here, but 1.0 there") as why:
        grading.grade([sample("34")])
    assert f"{HOSTILE} is the digest" in str(why.value)


def test_without_a_node_for_it_a_worker_is_an_error_with_what_is_needed(cluster):
    cluster.all = [Node("n1", "10.0.0.1", {"TPU": 4.0})]
    with (
        pool(cluster) as grading,
        pytest.raises(ValueError, match="none of the cluster's 1 nodes offers CPUs"),
    ):
        grading.grade([sample("34")])
    cluster.all = [Node("n1", "10.0.0.1", {"CPU": 4.0})]
    cluster.start = lambda *_, **__: (_ for _ in ()).throw(remote_worker.DiedError("no answer"))
    with (
        pool(cluster) as grading,
        pytest.raises(RewardError, match="cannot start a worker on a node: no answer"),
    ):
        grading.grade([sample("34")])


def test_places_are_in_proportion_to_cpus_and_not_on_lost_nodes(cluster):
    cluster.all = [Node(name, name, {"CPU": cpus}) for name, cpus in (("a", 6.0), ("b", 2.0), ("c", 0.0))]
    places = Places(cluster)
    taken = [places.take() for _ in range(8)]
    assert sorted(node.id for node in taken) == ["a"] * 6 + ["b"] * 2
    places.free(taken[0], lost=True)
    assert {places.take().id for _ in range(20)} == {"b"}


def test_files_of_the_user_and_the_modules_that_they_import_are_found(tmp_path, monkeypatch):
    """Also outside the current folder, in a folder of the import path, and by relative imports; but no module of Python or of this package."""
    here, other = tmp_path / "here", tmp_path / "other"
    for path, text in {
        "here/my.py": "import json, numpy, near, dapo_jax.rewards\ndef grade():\n    import pack.mine, bare.rules",
        "here/near.py": "",
        "here/agent.py": "",
        "here/pack/__init__.py": "",
        "here/pack/mine.py": "from . import rules\nfrom far.away import one",
        "here/pack/rules.py": "",
        "here/prompt.txt": "import near",
        "here/bare/rules.py": "",
        "other/far/__init__.py": "import no_such_module",
        "other/far/away.py": "one = 1",
        "other/far/unused.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, "", str(other)])
    package = [f"here/pack/{name}.py" for name in ("__init__", "mine", "rules")]
    package += [f"other/far/{name}.py" for name in ("__init__", "away")]
    for value, names in {
        "my.py:grade": ["here/my.py", "here/near.py", "here/bare/rules.py", *package],
        "trl:my.py:Class+reward": ["here/my.py", "here/near.py", "here/bare/rules.py", *package],
        "pack.mine:grade": package,
        "far.unused:grade": ["other/far/__init__.py", "other/far/unused.py"],
        "command:python agent.py --x prompt.txt": ["here/agent.py", "here/prompt.txt"],
        f"{here}/near.py:grade": ["here/near.py"],
        "math": [],
        "collections:Counter": [],
    }.items():
        found = user_files({"grader": value, "answer_marker": "=", "options": {}})
        assert found == sorted(str(tmp_path / name) for name in names), value


def test_an_environments_episodes_go_on_when_their_node_is_lost(cluster):
    """The new worker replays the turns, so the answers are the same as without workers."""
    worker = partial(RemoteWorker, Places(cluster))
    source = f"{episodes_of_workers.SCRIPTED}:Scripted"
    remote = WorkerEnvironment(source, workers=1, timeout_s=5.0, memory_mb=512, worker=worker)
    play, answers = episodes_of_workers.play, []
    asked = episodes_of_workers.prompt()
    for environment in (Scripted(), remote):
        with episodes_of_workers.playing(environment) as episodes:
            found = [episodes_of_workers.appended(episodes.start(asked, index)) for index in range(2)]
            found += [play(episodes, asked, 0, "a", "b"), play(episodes, asked, 1, "c")]
            if environment is remote:
                cluster.lose(cluster.started[-1].node)
            found += [play(episodes, asked, 0, "echo"), play(episodes, asked, 1, "d")]
            answers.append(found)
    assert answers[0] == answers[1]
    assert len({actor.node.id for actor in cluster.started}) == 2


# Slow: a cluster of two nodes. One node freezes or dies. Ray notices a frozen node after 64 s.
@pytest.mark.slow
@pytest.mark.parametrize("way", ["frozen", "killed"])
def test_the_calls_of_a_node_of_ray_are_repeated_on_the_other_node(two_nodes, way, monkeypatch):
    cluster = Cluster(two_nodes.address)
    monkeypatch.setattr(cluster, "nodes", list(cluster.nodes()[::-1]).copy)
    with closing(cluster), pool(cluster, timeout_s=60.0) as grading:
        assert grading.grade([sample("34")])[
            0
        ].correct  # the worker has begun, on the node that is not the head
        asked = grading.submit(samples("slow", *["34"] * 40, answer="34"))
        time.sleep(0.1)
        start = time.monotonic()
        two_nodes.freeze("127.0.0.3") if way == "frozen" else two_nodes.lose("127.0.0.3")
        verdicts = asked.result(60)
        assert [verdict.correct for verdict in verdicts] == [False] + [True] * 40
        assert not any(verdict.lost for verdict in verdicts)
        # At the latest after 10 s of silence; the rest is the start of a worker.
        assert time.monotonic() - start < 30
