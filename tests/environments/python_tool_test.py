"""The tool `python`: the text that the policy reads."""

import asyncio
import select

import pytest

from dapo_jax.environments.calls import LostError
from dapo_jax.environments.python_tool import PythonEnvironment, python_tool
from dapo_jax.environments.tool_calls import ToolCall
from dapo_jax.environments.tools import Tools
from dapo_jax.sandbox import Limits, SandboxError
from tests.sandbox.running import run


def shown(*codes, **limits):
    """The text and whether it is an error, for each program."""
    run("pass")  # skips without bubblewrap

    async def work():
        tools = Tools([python_tool(limits=Limits(**limits))])
        return [await tools.result(ToolCall("python", {"code": code})) for code in codes]

    return asyncio.run(work())


def test_the_output_and_the_last_value_are_shown_as_printed():
    codes = [
        "print(5); print(5)",
        "x = 2\nx + 1",
        "print('a')\n'b'",
        "x = 1",
        "None",
        "{'a': 1}",
        "print('{}')",
    ]
    expected = ["5\n5", "3", "a\n'b'", "(no output)", "(no output)", "{'a': 1}", "{}"]
    assert shown(*codes) == [(text, False) for text in expected]


def test_errors_have_their_type_and_line_and_no_frames_of_the_sandbox():
    raised, syntax, ended = (
        text
        for text, _ in shown("def f():\n    return 1 / 0\nf()", "print(2***2)", "import sys; sys.exit(3)")
    )
    assert raised.splitlines()[0] == "Traceback (most recent call last):"
    assert raised.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "    return 1 / 0" in raised
    assert raised.count("File") == raised.count('File "<program>"') == 2
    assert syntax.splitlines()[-1] == "SyntaxError: invalid syntax"
    assert ended.splitlines()[-1] == "SystemExit: 3"


def test_a_limit_is_named_after_the_output_so_far():
    text = "print('step 1')\nwhile True: pass"
    assert shown(text, cpu_s=0.2) == [("step 1\ntime limit of 0.2 s of processor time", False)]
    assert shown("import time; time.sleep(9)", idle_s=0.1) == [("time limit of 0.1 s without work", False)]
    assert shown("x = bytearray(2 << 30)")[0][0].endswith("memory limit of 1024 MiB")


def test_long_lines_are_cut_in_the_middle():
    [(text, _)] = shown("print('a' * 3000 + 'b' * 3000)")
    assert text == "a" * 1000 + "... (4,000 characters) ..." + "b" * 1000


def in_sessions(*sessions, slots=1, wait=None, **limits):
    """The texts of the calls of each session. The sessions take turns, and close, except for the last one, which ends with the sandbox."""
    run("pass")

    async def work():
        environment = PythonEnvironment(lambda answer, row: True, limits=Limits(**limits), slots=slots)
        episodes = [environment.episode({"prompt": "?"}, seed) for seed in range(len(sessions))]
        texts = [[] for _ in sessions]
        for codes in zip(*sessions, strict=True):
            for episode, found, code in zip(episodes, texts, codes, strict=True):
                found.append((await episode.tools.result(ToolCall("python", {"code": code})))[0])
            if wait:
                await wait(environment._sandbox)
        for episode in episodes[:-1]:
            await episode.close()
        servers = [*environment._sandbox.waiting.values()]
        environment._sandbox.close()
        assert len(servers) <= 1
        assert all(server.process.returncode is not None for server in servers)
        return texts

    return asyncio.run(work())


def test_a_session_keeps_its_variables_and_random_numbers_but_shows_each_output_once():
    first = [
        "import random\nx = [1]\nprint('a')\nrandom.random()",
        "x.append(2)\n1 / 0",
        "x",
        "random.random()",
    ]
    second = ["x = 5", "x", "x + 1", "print(x, 'b')"]
    texts, others = in_sessions(first, second)
    assert others == ["(no output)", "5", "6", "5 b"]
    assert texts[0].startswith("a\n0.")
    assert texts[1].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert texts[2] == "[1, 2]"
    assert texts[3] != texts[0].splitlines()[1]  # it continues the sequence


def test_a_session_is_one_process():
    """A random value of the operating system and a clock are as they were shown, which running the program again would change."""
    [texts] = in_sessions(
        ["import os, time\nx = os.urandom(8)\nprint(x.hex())", "print(x.hex())", "time.sleep(0.1)"]
    )
    assert texts == [texts[0], texts[0], "(no output)"]
    assert len(texts[0]) == 16


def test_sessions_beyond_four_for_each_slot_run_their_programs_again():
    """The fifth session ends the process of the first. Its programs run again, which only shows in random output."""
    first = ["import os\nx = 5\nprint(os.urandom(8))", "x"]
    texts, *others = in_sessions(first, *[["x = 6", "x"]] * 4)
    assert texts[1] == "5\n(earlier programs ran again, and printed something else)"
    assert others == [["(no output)", "6"]] * 4


def test_a_waiting_program_cannot_compute_without_a_limit():
    """Its threads run on between the calls, so the limit of the session's processor time always counts."""
    busy = "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f, daemon=True).start()"

    async def ends(sandbox):
        for server in sandbox.waiting.values():
            await asyncio.to_thread(select.select, [server._socket], [], [], 60)

    [texts] = in_sessions([busy, "1"], total_s=1.0, wait=ends)
    assert texts == ["(no output)", "time limit of 1 s of processor time\n(the variables are lost)"]


def test_waiting_for_a_slot_is_no_error(monkeypatch):
    run("pass")

    async def work():
        tools = Tools([python_tool(slots=1)], timeout_s=0.2)
        codes = ["import time; time.sleep(0.5)", "1"]
        return await asyncio.gather(*(tools.result(ToolCall("python", {"code": code})) for code in codes))

    assert asyncio.run(work()) == [("(no output)", False), ("1", False)]


def test_a_limit_ends_a_session():
    [texts] = in_sessions(["x = 5", "while True: pass", "x"], cpu_s=0.2)
    assert texts[1] == "time limit of 0.2 s of processor time\n(the variables are lost)"
    assert texts[2].splitlines()[-1] == "NameError: name 'x' is not defined"
    [texts] = in_sessions(["print('x' * 60)", "print('x' * 60)", "1"], output=100)
    assert texts[1].splitlines()[-2:] == ["output limit of 100 bytes", "(the variables are lost)"]
    assert texts[2] == "1"


def test_a_failure_of_the_sandbox_loses_the_episode(monkeypatch):
    run("pass")
    tools = Tools([python_tool()])

    async def fails(sandbox, program):
        raise SandboxError("no sandbox")

    monkeypatch.setattr("dapo_jax.sandbox.servers.ServerSandbox.surely", fails)
    with pytest.raises(LostError, match="no sandbox"):
        asyncio.run(tools.result(ToolCall("python", {"code": "1"})))
