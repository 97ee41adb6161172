"""A served report: its answers, refused requests, and new files."""

import gzip
import http.client
import json
import random
import threading
from contextlib import contextmanager

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.report import rollouts
from dapo_jax.report import server as report_server
from dapo_jax.report.server import Watched, _Server, watch
from tests.report.made import (
    metrics_line,
    problem_line,
    rollout_line,
    write_evaluation,
    write_rollouts,
    write_run,
)


@contextmanager
def served(*places):
    server = _Server(0, Watched(places))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    write_evaluation(folder, 0, [problem_line(0, 3)])
    return folder


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Files are read at every request."""
    monkeypatch.setattr(report_server, "LOOK_S", 0.0)


def asked(server, path, *, host=None, method="GET", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        sent = {"Host": host or f"127.0.0.1:{server.server_port}", **(headers or {})}
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def json_of(server, path):
    answer, content = asked(server, path)
    assert answer.status == 200
    return json.loads(content)


def caught_up(server):
    """Returns the data after all files were read; each look reads at least one file."""
    for _ in range(20):
        json_of(server, "/state")
    return json_of(server, "/data")


def test_only_the_page_and_its_data_are_served(run):
    with served(run) as server:
        data = caught_up(server)
        answer, page = asked(server, "/")
        assert answer.status == 200
        assert b'id="index-0"' in page
        assert b'id="chunk-0-0"' not in page
        assert b"connect-src 'self'" in page
        answer, chunk = asked(server, "/packed/chunk-0-0")
        assert json.loads(gzip.decompress(chunk))[0]["prompt"].startswith("what is")
        number = data["runs"][0]["evaluations"]["datasets"][0]["evaluations"][0][1]
        assert json.loads(gzip.decompress(asked(server, f"/packed/eval-0-{number}")[1]))["0"]["responses"]
        for path in (
            "/config.yaml", "/../config.yaml", "/packed/chunk-0-99", "/packed/chunk-9-0", "/packed/chunk-0-0/..",
            "/%2e%2e/config.yaml", f"{run}/config.yaml", "*",
        ):  # fmt: skip
            assert asked(server, path)[0].status == 404, path
        assert asked(server, "/state", method="POST")[0].status == 501


def test_only_this_machine_can_connect_and_no_foreign_page_can_read(run):
    """A foreign page may have a name that resolves to this machine (DNS rebinding)."""
    with served(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_port
        for path in ("/", "/state", "/data", "/packed/chunk-0-0"):
            for host in (f"evil.example:{port}", "127.0.0.1:1", f"localhost.evil.example:{port}", " "):
                answer, content = asked(server, path, host=host)
                assert answer.status == 403, host
                assert b"what is" not in content
        for path in ("/", "/state", "/data"):
            foreign = {"Origin": "http://evil.example"}
            answer, _ = asked(server, path, host=f"localhost:{port}", headers=foreign)
            assert answer.status == 200
            headers = {name.lower(): value for name, value in answer.getheaders()}
            assert "access-control-allow-origin" not in headers
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
            assert headers["cache-control"] == "no-store"


def test_files_of_rollouts_are_read_once(run, monkeypatch):
    read = []
    plain = rollouts.read_rollouts
    monkeypatch.setattr(rollouts, "read_rollouts", lambda path: read.append(path.name) or plain(path))
    with served(run) as server:
        before = caught_up(server)
        assert read == ["step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl"]
        assert json_of(server, "/state")["version"] == before["watched"]  # nothing is new
        first = asked(server, "/packed/chunk-0-0")[1]
        rng = random.Random(4)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_line(4, rng)) + "\n")
        write_rollouts(run, 4, [rollout_line(4, 99, index, rng=rng, prompt="new") for index in range(4)])
        write_evaluation(run, 4, [problem_line(0, 5)])
        after = caught_up(server)
        assert after["watched"] > before["watched"]
        assert read[3:] == ["step_000004.jsonl"]
        assert asked(server, "/packed/chunk-0-0")[1] == first
        [described] = after["runs"]
        assert (described["axes"]["step"][-1], described["rollouts"]["steps"][-1]) == (4, 4)
        assert [step for step, _ in described["evaluations"]["datasets"][0]["evaluations"]] == [0, 4]


def test_a_run_that_has_just_begun_is_read(tmp_path):
    run = write_run(tmp_path / "run", steps=1, tokenizer=False)
    lines = (run / "metrics.jsonl").read_text()
    rows = (run / "rollouts" / "step_000001.jsonl").read_text()
    (run / "metrics.jsonl").unlink()
    (run / "rollouts" / "step_000001.jsonl").unlink()
    with served(run) as server:
        data = caught_up(server)
        assert data["runs"][0]["axes"]["step"] == []
        assert data["panels"] == []
        (run / "metrics.jsonl").write_text(lines)
        (run / "rollouts" / "step_000001.jsonl").write_text(rows)
        data = caught_up(server)
        assert data["runs"][0]["axes"]["step"] == [0, 1]
        assert data["runs"][0]["rollouts"]["steps"] == [1]


def test_later_damage_is_reported_and_the_page_stays(run):
    with served(run) as server:
        before = caught_up(server)
        whole = (run / "metrics.jsonl").read_text()
        with (run / "metrics.jsonl").open("a") as file:
            file.write('nonsense\n{"step": 9}\n')
        state = json_of(server, "/state")
        assert "metrics.jsonl, line 5 is not a line of metrics" in state["error"]
        assert json_of(server, "/state")["version"] == state["version"]
        assert json_of(server, "/data")["runs"][0]["columns"] == before["runs"][0]["columns"]
        (run / "mended").write_text(whole)
        (run / "mended").rename(run / "metrics.jsonl")
        assert json_of(server, "/state")["error"] == ""


def test_an_unavailable_port_is_an_error(run):
    with (
        served(run) as server,
        pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{server.server_port} \(Address already in use\)"),
    ):
        watch(run, port=server.server_port)
    with pytest.raises(ConfigError, match="found 70000"):
        watch(run, port=70000)
