"""The engine: refusals without Ray; with Ray, actors, stored values, and the notice of a death."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, wait
from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest

from dapo_jax.cluster import engine as module
from dapo_jax.cluster.engine import Cluster, DiedError, check_facts, facts
from tests.cluster.threads import ThreadCluster
from tests.faults.micro import started

COUNTER = "tests.cluster.threads:Counter"


def test_without_the_extra_the_message_has_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"cluster.address=auto needs ray: pip install .*\[cluster\]"):
        Cluster("auto")


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_a_cluster_that_other_machines_reach_needs_a_token(monkeypatch, mode):
    """It is refused before a connection is tried: nothing listens at this address."""
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    monkeypatch.setenv("RAY_AUTH_MODE", mode) if mode else monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ValueError, match=r"any program that reaches 192.0.2.7 .*RAY_AUTH_MODE=token"):
        Cluster("192.0.2.7:6379")


@pytest.mark.parametrize(
    ("host", "needs"),
    [("127.0.0.1", False), ("localhost", False), ("[::1]", False), ("10.0.0.1", True), ("head", True)],
)
def test_loopback_needs_no_token(monkeypatch, host, needs):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if needs:
        with pytest.raises(ValueError, match="RAY_AUTH_TOKEN"):
            module._check_token("x", [host])
    module._check_token("x", [] if needs else [host])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    module._check_token("x", [host])


def test_a_difference_is_refused_with_both_values(tmp_path):
    path = tmp_path / "my.py"
    path.write_text("one = 1")
    own = facts(["numpy"], [str(path)])
    check_facts(own, facts(["numpy"], [str(path)]), "Host on 10.0.0.2")
    path.write_text("one = 2")
    found = facts(["numpy"], [str(path)]) | {"numpy": "1.0"}
    with pytest.raises(ValueError, match=r"Host on 10.0.0.2 differs") as refused:
        check_facts(own, found, "Host on 10.0.0.2")
    assert f"numpy is {importlib.metadata.version('numpy')} here, but 1.0 there" in str(refused.value)
    assert f"{path} is {own[str(path)]} here, but {found[str(path)]} there" in str(refused.value)
    assert "Python" not in str(refused.value)
    path.unlink()
    assert facts((), [str(path)])[str(path)] == "no such file"


def test_the_source_code_of_the_package_is_compared(monkeypatch, tmp_path):
    before = facts()["dapo_jax"]
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    assert facts()["dapo_jax"] != before


def test_the_end_of_an_output_is_short_and_on_one_line(tmp_path):
    (tmp_path / "log").write_bytes(b"1\n\n" + b"\xff" * 3000 + b"\n2\n  3\n")
    found = module._Inside().call("last_lines", f"{tmp_path}/log")
    assert found == f"1 | {200 * chr(0xFFFD)} | 2 |   3"
    (tmp_path / "log").write_text("".join(f"{number:04}\n" for number in range(1000)))
    assert module._Inside().call("last_lines", f"{tmp_path}/log").split(" | ") == [
        f"{n:04}" for n in range(980, 1000)
    ]


def test_an_actor_ends_with_the_process_of_its_node():
    """Both write to the same pipe, so its end is the end of both."""
    actor = "import os; from dapo_jax.cluster import engine; node = os.getppid(); print('began', flush=True); engine._end_with(node)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {actor!r}])"
    node = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert node.stdout.readline() == "began\n"
    node.kill()
    assert node.communicate(timeout=20)[0] == ""


def test_the_double_does_as_the_engine():
    """The same checks as with Ray, below."""
    engine = ThreadCluster(resources={"CPU": 1.0, "TPU": 1.0})
    check_an_engine(engine, engine.lose)
    engine.close()


@contextmanager
def soon():
    """Limits the start of an actor that cannot start to 6 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "START_S", 6.0)
        yield


def check_an_engine(engine, lose):
    """Checks calls, errors, stored values, resources, and deaths. `lose` ends a node."""
    first, second = engine.nodes()
    actor = engine.start(COUNTER, 1, node=second)
    assert [actor.call("add", 2).result(), actor.call("add", 3).result()] == [3, 6]
    with pytest.raises(ValueError, match="the sum is 6"):
        actor.call("fail").result()
    assert actor.call("process").result()[1] == os.getcwd()
    value = engine.put(np.arange(5))
    assert actor.call("add", value).result().tolist() == [6, 7, 8, 9, 10]
    holder = engine.start(COUNTER, 0, node=first, resources={"TPU": 1})
    waiting = holder.call("sleep", "/no/such/file")
    done, _ = wait([waiting, actor.call("add", 1)], timeout=20, return_when="FIRST_COMPLETED")
    assert waiting not in done
    assert len(done) == 1
    with pytest.raises(DiedError, match="TPU"), soon():
        engine.start(COUNTER, 0, node=first, resources={"TPU": 1})
    engine.kill(holder)
    with pytest.raises(DiedError, match=r"Counter on .* died"):
        waiting.result(20)
    with pytest.raises(DiedError):
        holder.call("add", 1).result(20)
    pending = actor.call("sleep", "/no/such/file")
    lose(second)
    with pytest.raises(DiedError, match=r"Counter on .* died"):
        pending.result(40)  # a node counts as dead 13 s after its last sign


def within_s(seconds, happened):
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.1)
    assert happened()


def processes_of_ray():
    found = subprocess.run(["pgrep", "-fa", "raylet|gcs_server|ray::"], capture_output=True, text=True)
    return {line.split()[0] for line in found.stdout.splitlines()}


def test_a_death_is_reported_also_while_the_connection_is_closed(monkeypatch):
    """Ray's calls raise SystemExit then. A call without an answer would wait forever."""
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    actor, answer = module.Actor(None, "Counter on 10.0.0.2"), Future()
    actor.facts = {"node": "n1", "output": "/no/such/file"}
    monkeypatch.setattr(module, "_made", Mock(side_effect=SystemExit(0)))
    actor._fail(answer, RuntimeError("The actor is dead because its process ended"))
    with pytest.raises(DiedError, match=r"Counter on 10.0.0.2 died: its process ended$"):
        answer.result(0)


# Slow: starts a cluster of two nodes, and waits twice 6 s for an actor that cannot start.
@pytest.mark.slow
def test_the_engine_on_two_nodes(two_nodes):
    before = signal.getsignal(signal.SIGTERM)
    engine = Cluster(two_nodes.address)
    assert signal.getsignal(signal.SIGTERM) is before  # the handler of the run, which saves a checkpoint
    with pytest.raises(ValueError, match="connected to a Ray cluster already"):
        Cluster(two_nodes.address)
    assert [node.address for node in engine.nodes()] == ["127.0.0.2", "127.0.0.3"]
    message = r"did not start within 6 s. It needs TPU 4; .* free .*: CPU 2, TPU 2"
    with pytest.raises(DiedError, match=message), soon():
        engine.start(COUNTER, 0, resources={"TPU": 4})
    check_an_engine(engine, lambda node: two_nodes.lose(node.address))
    other = engine.start(COUNTER, 0, node=engine.nodes()[0])  # the other node may not count as dead yet
    process, _ = other.call("process").result()
    pending = other.call("sleep", "/no/such/file")
    os.kill(process, signal.SIGKILL)
    with pytest.raises(DiedError, match="died"):
        pending.result(10)
    other, began = engine.start(COUNTER, 0, node=engine.nodes()[0]), time.monotonic()
    with pytest.raises(
        DiedError, match=r"Counter on 127.0.0.2 died: .* The end of its output: .*the last words"
    ):
        other.call("crash").result(20)
    print(f"a death was noticed, with the end of its output, after {time.monotonic() - began:.2f} s")
    engine.close()
    with pytest.raises(DiedError, match="the connection to the cluster was closed"):
        other.call("add", 1).result(10)  # otherwise ray would start a cluster
    two_nodes.close()
    within_s(30, lambda: processes_of_ray() <= two_nodes.before)


CLOSED_WHILE_A_DEAD_NODE_IS_ASKED = """
import sys
from concurrent.futures import wait
from dapo_jax.cluster.engine import Cluster
cluster = Cluster(sys.argv[1])
[node] = [node for node in cluster.nodes() if node.address == "127.0.0.3"]
actors = [cluster.start("tests.cluster.threads:Counter", 1, node=node) for _ in range(8)]
print("started", flush=True)
sys.stdin.readline()
dead = [actor.call("add", 1) for actor in actors]
print(len(wait(dead, timeout=3).done), flush=True)
cluster.close()
print(*{type(one.exception(15)).__name__ for one in dead}, flush=True)
"""


# Slow: starts a cluster of two nodes.
@pytest.mark.slow
def test_a_process_may_close_the_connection_while_a_dead_node_is_asked_for_an_output(two_nodes):
    """The engine asks for up to 10 s. Ray ends a process that frees a reference to an object while another thread closes the connection."""
    program = "-c", CLOSED_WHILE_A_DEAD_NODE_IS_ASKED, two_nodes.address
    with started(program=program, stdin=subprocess.PIPE) as process:
        lines = iter(process.stdout.readline, "")
        assert "started\n" in lines
        two_nodes.lose("127.0.0.3")
        output, _ = process.communicate("lost\n", timeout=60)
    assert output.split() == ["0", "DiedError"]
    assert process.returncode == 0


WITH_A_TOKEN = """
import os, subprocess, sys
from ray.cluster_utils import Cluster
nodes = Cluster(True, head_node_args={"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20})
code = f'''
from dapo_jax.cluster.engine import Cluster
cluster = Cluster("{nodes.address}")
print("the sum is", cluster.start("tests.cluster.threads:Counter", 1).call("add", 1).result(10))
cluster.close()
'''
for change in ({}, {"RAY_AUTH_TOKEN": "cd" * 32}, {"RAY_AUTH_MODE": "disabled"}):
    subprocess.run([sys.executable, "-c", code], env=os.environ | change, stderr=subprocess.STDOUT)
nodes.shutdown()
"""


# Slow: a cluster on this machine's own address, to which three processes connect.
@pytest.mark.slow
def test_a_cluster_with_a_token_accepts_this_token_alone():
    pytest.importorskip("ray", reason="needs the extra `cluster`")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", WITH_A_TOKEN]
    done = subprocess.run(command, env=os.environ | token, capture_output=True, text=True, timeout=300)
    assert done.stdout.count("the sum is 2") == 1, done.stdout + done.stderr
    assert done.stdout.count("ValueError: cluster.address") == 2
    assert done.stdout.count("there is no Ray cluster with this token") == 1
    assert done.stdout.count("Set RAY_AUTH_MODE=token on all machines") == 1
