"""The tool `python` for a `ToolEnvironment`: the policy writes programs, which run in a sandbox, and reads their output."""

from collections.abc import Awaitable, Callable
from typing import Any

from dapo_jax.sandbox import Limits, Outcome, Program, load_sandbox

LIMITS = Limits(cpu_s=4.0, idle_s=3.0)
"""The default limits. Together they are below the time limit of a call (`Tools`)."""
_LONGEST_LINE = 2000
_ENDED = {
    "cpu": "time limit of {cpu_s:g} s of processor time",
    "total": "time limit of {total_s:g} s of processor time",
    "idle": "time limit of {idle_s:g} s without work",
    "memory": "memory limit of {memory_mb} MiB",
    "output": "output limit of {output} bytes",
}


def python_tool(
    *, backend: str = "auto", slots: int = 0, interpreter: str = "", limits: Limits = LIMITS
) -> Callable[[str], Awaitable[str]]:
    """Returns the function `python(code)` for `ToolEnvironment([python_tool()], grade)`. Each call is a program of its own.

    See `load_sandbox` for the arguments and the errors. If the sandbox fails, the episode is lost, so that the policy never sees such a failure.
    """
    sandbox = load_sandbox(backend, slots=slots, python=interpreter)

    async def python(code: str) -> str:
        """Runs a Python program. Returns its output and the value of its last expression, or the error.

        Args:
            code: the program
        """

        async def work() -> str:
            async with sandbox.live(Program(source="", limits=limits), "calls") as server:
                await server.tell({"name": "", "args": [code]})
                reply = await server.said()
                return _shown(reply, await server.ended(stop=True), limits)

        return await sandbox.surely(work) or "the program ended the interpreter"

    return python


def _shown(reply: Any, outcome: Outcome, limits: Limits) -> str:
    """Returns the output of a program as text. Long lines are cut in the middle, so that an error at the end survives."""
    failed = not isinstance(reply, dict) or "raise" in reply
    text = (outcome.stdout + outcome.stderr * failed).decode(errors="replace")
    if outcome.ended in _ENDED:
        text = f"{text.rstrip()}\n{_ENDED[outcome.ended].format(**vars(limits))}"
    elif reply is None:
        text = f"{text.rstrip()}\nended with {outcome.ended} {outcome.status}"
    lines = text.strip("\n").split("\n")
    for number, line in enumerate(lines):
        if (left_out := len(line) - _LONGEST_LINE) > 0:
            start, end = line[: _LONGEST_LINE // 2], line[-_LONGEST_LINE // 2 :]
            lines[number] = f"{start}... ({left_out:,} characters) ...{end}"
    return "\n".join(lines) or "(no output)"
