"""Programs on a remote service. The service here is a double: it reads SandboxFusion's format, and runs programs on this machine without isolation."""

import asyncio
import base64
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from dapo_jax.environments.python_tool import PythonEnvironment
from dapo_jax.environments.tool_calls import ToolCall
from dapo_jax.sandbox import Limits, Program, SandboxError, load_sandbox
from dapo_jax.sandbox.remote import RemoteServer
from dapo_jax.sandbox.servers import ServerError, ServerSandbox
from tests.rewards import code_grader_test as grading
from tests.rewards.code_grader_test import ADD, ASSERTS, SUM, case, fenced
from tests.rewards.judge_test import serving

ADDS = "def add(a, b): return a + b"


def executed(request, folder):
    """The answer to a request. A response of the service has no other fields that matter here."""
    for path, content in request["files"].items():
        (folder / path).write_bytes(base64.b64decode(content))
    (folder / "main.py").write_text(request["code"])
    command, limit = [sys.executable, str(folder / "main.py")], request["run_timeout"]
    try:
        done = subprocess.run(command, cwd=folder, timeout=limit, capture_output=True, check=False)
        ran = {"status": "Finished", "return_code": done.returncode, "execution_time": 0.1}
    except subprocess.TimeoutExpired:
        ran = {"status": "TimeLimitExceeded", "return_code": None, "execution_time": limit}
    written = [path for path in request["fetch_files"] if (folder / path).is_file()]
    files = {path: base64.b64encode((folder / path).read_bytes()).decode() for path in written}
    status = "Success" if ran["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "run_result": ran, "files": files}


def sandbox_at(url):
    return ServerSandbox(partial(RemoteServer, url), slots=4, remedy="start it")


@pytest.fixture
def service(monkeypatch, tmp_path):
    """The sandbox of tests is the service. A source with the word `damage` makes it fail."""

    def post(server, request, timeout_s):
        if b"damage" in base64.b64decode(request["files"]["source"]):
            return {"status": "SandboxError", "message": "killed"}
        assert request["language"] == "python"
        return executed(json.loads(json.dumps(request)), Path(tempfile.mkdtemp(dir=tmp_path)))

    monkeypatch.setattr(RemoteServer, "_post", post)
    monkeypatch.setattr("tests.sandbox.running.made", lambda slots: sandbox_at("http://service"))
    monkeypatch.setattr(
        "dapo_jax.environments.python_tool.load_sandbox", lambda: sandbox_at("http://service")
    )


def test_programs_functions_and_asserts_are_graded(service):
    short = Limits(cpu_s=0.5, idle_s=2.5)  # the service counts the start of the interpreter, too
    grading.check(
        [
            case("script", "passed", fenced("print(sum(map(int, input().split())))"), SUM),
            case("wrong", "wrong_answer", fenced("print(3)"), SUM),
            case("function", "passed", fenced(ADDS), ADD),
            case("asserts", "passed", fenced(ADDS), ASSERTS),
            case("half", "wrong_answer", fenced("def add(a, b): return 3"), ASSERTS),
            case("exit", "crashed", fenced("import os\ndef add(a, b): os._exit(0)"), ASSERTS),
            case("idle", "time_limit", fenced("import time; time.sleep(60)"), SUM, limits=short),
            case("memory", "memory_limit", fenced("bytearray(2 << 30)"), SUM),
            case("long", "output_limit", fenced("print('x' * (1 << 20))"), SUM),
            case("long value", "output_limit", fenced("def add(a, b): return 'x' * (1 << 20)"), ADD),
            case("damage", "crashed", fenced("damage = 1"), SUM),
        ]
    )


@pytest.mark.slow  # several hundred interpreters start
def test_verdicts_are_the_same_as_in_bubblewrap(service):
    grading.test_problems()
    grading.test_formats_of_datasets()


def test_a_session_of_the_tool_keeps_its_variables(service):
    async def work():
        tools = PythonEnvironment(lambda answer, row: True).episode({"prompt": "?"}, 0).tools
        codes = ["x = 1\nprint('a')", "x += 1\nx", "1 / 0", "x"]
        return [(await tools.result(ToolCall("python", {"code": code})))[0] for code in codes]

    first, second, third, fourth = asyncio.run(work())
    assert [first, second, fourth] == ["a", "2", "2"]
    assert third.endswith("ZeroDivisionError: division by zero")


def test_a_service_without_isolation_is_refused(service):
    with pytest.raises(ValueError, match=r"the sandbox leaks: a program read .*used the network"):
        load_sandbox("remote:http://service")


def answer(**fields):
    return 200, json.dumps({"status": "Failed", "message": "", "files": {}, **fields}).encode()


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ((500, b""), "HTTP Error 500"),
        ((0, b""), "RemoteDisconnected"),
        ((200, b"what"), "JSONDecodeError"),
        ((200, b"{}"), "KeyError: 'status'"),
        (answer(status="SandboxError", message="no more pods"), "SandboxError no more pods"),
        (answer(run_result=None), "did not start: None"),
        (answer(run_result={"status": "Finished", "return_code": 127}), "did not start: .*127"),
    ],
)
def test_a_failure_of_the_service_is_no_verdict(response, reason):
    """It is tried once more, and a known program decides whether the service or the program is at fault."""
    with serving(response) as server:
        sandbox = sandbox_at(server.url)
        with pytest.raises(SandboxError, match=rf"the sandbox failed: .*{reason}.*\. start it"):
            asyncio.run(sandbox.run(Program(source="print(1)")))
        assert sandbox.restarts == 1
        assert [path for path, *_ in server.seen] == ["/v1/run_code"] * 2


@pytest.mark.parametrize(
    ("response", "reason"),
    [((1, b""), "TimeoutError"), ((200, b"[" * 2000), "JSONDecodeError|RecursionError")],
)
def test_a_service_that_hangs_or_floods_is_no_verdict(monkeypatch, response, reason):
    monkeypatch.setattr("dapo_jax.sandbox.remote._WAIT_S", 0.2)
    monkeypatch.setattr("dapo_jax.sandbox.remote._MOST_BYTES", 1000)

    async def work(url):
        server = RemoteServer(url)
        await server.begin(Program(source="pass", limits=Limits(cpu_s=0.1, idle_s=0.1)), "script")
        await server.ended()

    with serving(response) as server, pytest.raises(ServerError, match=reason):
        asyncio.run(work(server.url))


def test_an_address_is_needed():
    with pytest.raises(ValueError, match=r"no sandbox is named 'remote'; there are .*remote:URL"):
        load_sandbox("remote")
    with pytest.raises(ValueError, match=r"Connection refused.*Start the service, and check the address"):
        load_sandbox("remote:http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"sandbox\.python=python3: the service .* leave it out"):
        load_sandbox("remote:http://127.0.0.1:9", python="python3")
