"""The tool `python` for environments with tools: the policy writes programs, which run in a sandbox, and reads their output."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dapo_jax.environments.tools import Grade, ToolEpisode, Tools
from dapo_jax.sandbox import Limits, Outcome, Program, load_sandbox
from dapo_jax.sandbox.servers import ServerSandbox

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
_NOTHING = None, Outcome(ended="server"), (0, 0)


def python_tool(*, limits: Limits = LIMITS, **options: Any) -> Callable[[str], Awaitable[str]]:
    """Returns the function `python(code)` for `ToolEnvironment([python_tool()], grade)`. Each call is a program of its own.

    `options` are the arguments of `load_sandbox`, which also has the errors. If the sandbox fails, the episode is lost, so that the policy never sees such a failure.
    """
    return _tool(load_sandbox(**options), limits, keep=False)


class PythonEnvironment:
    """An environment with the tool `python`, whose variables are kept until the end of the episode, and further tools.

    No process waits between calls: each call runs the earlier cells again, with the same seed, and then the new one.
    """

    def __init__(
        self,
        grade: Grade,
        functions: Sequence[Callable[..., Any]] = (),
        *,
        limits: Limits = LIMITS,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        """See `python_tool` for `limits`, `options` and the errors, and `Tools` for `functions` and `timeout_s`."""
        self._sandbox, self._limits = load_sandbox(**options), limits
        self._grade, self._functions, self._timeout_s = grade, functions, timeout_s

    def episode(self, row: Mapping[str, Any], seed: int) -> ToolEpisode:
        """Creates the episode for a response, with an empty session."""
        python = _tool(self._sandbox, self._limits, keep=True)
        return ToolEpisode(Tools([python, *self._functions], timeout_s=self._timeout_s), row, self._grade)


def _tool(sandbox: ServerSandbox, limits: Limits, *, keep: bool) -> Callable[[str], Awaitable[str]]:
    """Returns a tool with a session of its own. If `keep` is set, a cell can use the variables of earlier cells."""
    cells, printed = list[str](), b""

    async def python(code: str) -> str:
        """Runs a Python program. Returns its output and the value of its last expression, or the error.

        Args:
            code: the program
        """
        nonlocal printed
        reply, outcome, before = (
            await sandbox.surely(lambda: _run(sandbox, [*cells, code], limits)) or _NOTHING
        )
        rebuilt, out = outcome.stdout[: before[0]], outcome.stdout[before[0] :]
        text = _shown(reply, replace(outcome, stdout=out, stderr=outcome.stderr[before[1] :]), limits)
        if rebuilt != printed:
            text += "\n(earlier programs ran again, and printed something else)"
        if reply is None and cells:
            text += "\n(the variables are lost)"
        cells[:], printed = ([*cells, code], outcome.stdout) if keep and reply is not None else ([], b"")
        return text

    return python


async def _run(
    sandbox: ServerSandbox, cells: Sequence[str], limits: Limits
) -> tuple[Any, Outcome, tuple[int, int]]:
    """Runs cells. Returns the reply to the last of them, the outcome, and the sizes of the outputs before the last cell."""
    reply, before = None, (0, 0)
    async with sandbox.live(Program(source="", limits=limits), "calls") as server:
        for cell in cells:
            before = server.printed
            await server.tell({"name": "", "args": [cell]})
            if (reply := await server.said()) is None:
                break
        return reply, await server.ended(stop=True), before


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
