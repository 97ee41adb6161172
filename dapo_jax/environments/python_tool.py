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
    "wall": "time limit",
    "memory": "memory limit of {memory_mb} MiB",
    "output": "output limit of {output} bytes",
}
_NOTHING = None, Outcome(ended="server"), b""


def python_tool(*, limits: Limits = LIMITS, **options: Any) -> Callable[[str], Awaitable[str]]:
    """Returns the function `python(code)` for `ToolEnvironment([python_tool()], grade)`. Each call is a program of its own.

    `options` are the arguments of `load_sandbox`, which also has the errors. If the sandbox fails, the episode is lost, so that the policy never sees such a failure.
    """
    return _Session(load_sandbox(**options), limits, keeps=False).python


class PythonEnvironment:
    """An environment with the tool `python`, whose variables are kept until the end of the episode, and further tools.

    A process waits between the calls of an episode. If it had to end, the next call runs the earlier programs again, with the same seed.
    """

    def __init__(
        self,
        grade: Grade,
        functions: Sequence[Callable[..., Any]] = (),
        *,
        limits: Limits = LIMITS,
        timeout_s: float = 10.0,
        **options: Any,
    ) -> None:
        """See `python_tool` for `limits`, `options` and the errors, and `Tools` for `functions` and their `timeout_s`."""
        self._sandbox, self._limits = load_sandbox(**options), limits
        self._grade, self._functions, self._timeout_s = grade, functions, timeout_s

    def episode(self, row: Mapping[str, Any], seed: int) -> ToolEpisode:
        """Creates the episode for a response, with an empty session."""
        session = _Session(self._sandbox, self._limits, keeps=True)
        tools = Tools([session.python, *self._functions], timeout_s=self._timeout_s)
        return _PythonEpisode(session, tools, row, self._grade)


class _PythonEpisode(ToolEpisode):
    def __init__(self, session: "_Session", *args: Any) -> None:
        super().__init__(*args)
        self.close = session.close


class _Session:
    """The programs of an episode. If `keeps` is set, a program can use the variables of earlier ones."""

    limits_itself = True  # so `Tools` does not limit the calls of `python`, which wait for a slot

    def __init__(self, sandbox: ServerSandbox, limits: Limits, *, keeps: bool) -> None:
        self._sandbox, self._limits, self._keeps = sandbox, limits, keeps
        self._cells, self._printed = list[str](), b""

    async def python(self, code: str) -> str:
        """Runs a Python program. Returns its output and the value of its last expression, or the error.

        Args:
            code: the program
        """
        reply, outcome, before = await self._sandbox.surely(lambda: self._run(code)) or _NOTHING
        text = _shown(reply, outcome, self._limits)
        if before != self._printed:
            text += "\n(earlier programs ran again, and printed something else)"
        if reply is None and self._cells:
            text += "\n(the variables are lost)"
        if self._keeps:
            kept = reply is not None
            self._cells, self._printed = (
                ([*self._cells, code], before + outcome.stdout) if kept else ([], b"")
            )
        return text

    async def _run(self, code: str) -> tuple[Any, Outcome, bytes]:
        """Runs a program. Returns its reply, or None if it ended the process; its outcome; and the output of the earlier programs."""
        session = self if self._keeps else None
        cells = [code] if session in self._sandbox.waiting else [*self._cells, code]
        reply, before = None, (b"", b"")
        async with self._sandbox.live(Program(source="", limits=self._limits), "calls", session) as server:
            for cell in cells:
                before = server.printed
                await server.tell({"name": "", "args": [cell]})
                if (reply := await server.said()) is None:
                    break
            if reply is None or len(server.printed[0]) > self._limits.output:
                reply, outcome = None, await server.ended(stop=True)
            else:
                outcome = Outcome(ended="stopped", stdout=server.printed[0], stderr=server.printed[1])
        out, error = outcome.stdout[len(before[0]) :], outcome.stderr[len(before[1]) :]
        return reply, replace(outcome, stdout=out, stderr=error), before[0]

    async def close(self) -> None:
        """Ends the process of the session, if one waits."""
        if self in self._sandbox.waiting:
            async with self._sandbox.live(Program(source=""), "calls", self) as server:
                await server.ended(stop=True)


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
