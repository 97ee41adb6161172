"""The tool `python`: the text that the policy reads."""

import asyncio

import pytest

from dapo_jax.environments.calls import LostError
from dapo_jax.environments.python_tool import python_tool
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


def test_a_failure_of_the_sandbox_loses_the_episode(monkeypatch):
    run("pass")
    tools = Tools([python_tool()])

    async def fails(sandbox, program):
        raise SandboxError("no sandbox")

    monkeypatch.setattr("dapo_jax.sandbox.servers.ServerSandbox.surely", fails)
    with pytest.raises(LostError, match="no sandbox"):
        asyncio.run(tools.result(ToolCall("python", {"code": "1"})))
