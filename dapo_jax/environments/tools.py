"""A tool environment: the policy may call Python functions, and its final answer is graded.

The answer to a turn with calls consists of the results, as messages with the role `tool`. A turn without calls is the final answer and ends
the episode. Malformed calls, unknown tools, invalid arguments, and tools that raise or take too long are reported to the policy as
errors, and the episode continues.
"""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.environments.calls import LostError, outcome
from dapo_jax.environments.protocol import Context, Message, Step, Turn
from dapo_jax.environments.tool_calls import BrokenCall, ToolCall, tool_calls
from dapo_jax.environments.tool_schemas import schema_of, what_is_wrong
from dapo_jax.rewards.async_calls import ends_in_time
from dapo_jax.rewards.functions import as_verdict
from dapo_jax.sandbox import SandboxError
from dapo_jax.text.messages import content_text

Grade = Callable[[str, Mapping[str, Any]], Any]
"""A sync or async function `grade(answer_text, row)` that returns a bool, a number or a Verdict, like a reward function."""


class Tools:
    """The functions that the policy may call, with their schemas. Calls the functions and converts their results to text."""

    def __init__(
        self, functions: Sequence[Callable[..., Any]], *, most_characters: int = 8192, timeout_s: float = 10.0
    ) -> None:
        """Creates the functions' schemas. Raises ValueError if a function cannot be a tool, or two functions have the same name.

        Args:
            functions: the tools. A function without `async def` runs in a separate thread.
            most_characters: maximum length of a call's result. A longer result is cut off and ends with a note.
            timeout_s: time limit of a call in seconds, except of the tool `python`, which has its own. If the calls of a turn together exceed `workers.timeout_s`, the episode is lost.
        """
        self.schemas = [schema_of(function) for function in functions]
        names = [schema["function"]["name"] for schema in self.schemas]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are named {twice[0]!r}; tool names must be unique")
        self.known = dict(zip(names, zip(functions, self.schemas, strict=True), strict=True))
        """For each name of a tool, its function and its schema."""
        self._most_characters, self._timeout_s = most_characters, timeout_s

    async def result(self, call: ToolCall | BrokenCall) -> tuple[str, bool]:
        """Runs a tool call. Returns the result as text, and whether it is an error."""
        text, error = await self._outcome(call)
        text = f"error: {error}" if error else text
        if (left_out := len(text) - self._most_characters) > 0:
            text = f"{text[: self._most_characters]}\n({left_out:,} more characters were cut off)"
        return text, bool(error)

    async def _outcome(self, call: ToolCall | BrokenCall) -> tuple[str, str]:
        """Runs a tool call. Returns `(text of the result, "")`, or `("", error message)` if the call failed."""
        if isinstance(call, BrokenCall):
            return "", f"the call cannot be parsed: {call.reason}"
        if call.name not in self.known:
            return "", f"unknown tool {call.name!r:.80}; the tools are {sorted(self.known)}"
        function, schema = self.known[call.name]
        if wrong := what_is_wrong(call.arguments, schema["function"]["parameters"]):
            return "", f"{call.name}: {wrong}"
        task = asyncio.ensure_future(outcome(partial(function, **call.arguments)))
        try:
            limits_itself = getattr(getattr(function, "__self__", None), "limits_itself", False)
            is_in_time = await ends_in_time(task, math.inf if limits_itself else self._timeout_s)
        finally:
            task.cancel()
        if not is_in_time:
            return "", f"{call.name}: no result within {self._timeout_s:g} s"
        result, error = task.result()
        if isinstance(error, SandboxError):  # not a mistake of the policy
            raise LostError(str(error))
        text = result if error is None else f"{type(error).__name__}: {error!s:.500}"
        try:
            text = str(text) if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
            text.encode("utf-8")  # raises for an unpaired surrogate
        except (TypeError, ValueError, RecursionError):
            return "", f"{call.name} returned a {type(result).__name__} that cannot be converted to text"
        return (text, "") if error is None else ("", f"{call.name}: {text}")


class ToolEpisode:
    """A tool episode, created by a `ToolEnvironment`. A subclass may override `finish`, which grades the final answer."""

    def __init__(self, tools: Tools, row: Mapping[str, Any], grade: Grade | None = None) -> None:
        """Stores the arguments. The row's `prompt` is a text or a list of messages. `grade` is required unless a subclass overrides `finish`."""
        self.tools, self.row, self._grade = tools, row, grade
        self.calls, self.errors = 0, 0

    async def start(self) -> Context:
        """Returns the row's conversation, with the tool schemas for the chat template."""
        return Context(conversation(self.row), tools=self.tools.schemas)

    async def step(self, turn: Turn) -> Step:
        """Returns the results of the turn's calls. If there are no calls, grades the answer and ends the episode."""
        calls = tool_calls(turn.marked_text or turn.text, self.tools.schemas)
        if not calls:
            final = await self.finish(turn)
            return replace(final, done=True, metrics={**self.metrics(), **final.metrics})
        messages: list[Message] = []
        for call in calls:  # one at a time, because a call may depend on the previous one
            text, is_error = await self.tools.result(call)
            self.calls, self.errors = self.calls + 1, self.errors + is_error
            name, made = getattr(call, "name", ""), getattr(call, "id", "")
            # A chat template may refuse the characters in the name of an unknown tool.
            fields = {"name": name if name in self.tools.known else "", "tool_call_id": made}
            messages.append({"role": "tool", **{k: v for k, v in fields.items() if v}, "content": text})
        return Step(append=messages, metrics=self.metrics())

    async def finish(self, turn: Turn) -> Step:
        """Grades the final answer. Returns a Step with `reward`, `correct` and `metrics`. Raises ValueError if `grade` returns no verdict."""
        if self._grade is None:
            raise ValueError("a tool episode needs `grade`, or a subclass that overrides `finish`")
        result, error = await outcome(self._grade, turn.text, self.row)
        if error is not None:
            raise error
        verdict: Verdict = as_verdict(result, name="grade")
        reward = float(verdict.correct) if verdict.score is None else verdict.score
        return Step(reward=reward, correct=verdict.correct, metrics=verdict.parts)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics `tool_calls`, the number of calls, and `tool_errors`, the number of calls with an error."""
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}


class ToolEnvironment:
    """An environment in which the policy can call functions and its final answer is graded."""

    def __init__(self, functions: Sequence[Callable[..., Any]], grade: Grade, **limits: Any) -> None:
        """Creates the functions' schemas. See `Tools` for the possible `limits` and the exceptions."""
        self._tools, self._grade = Tools(functions, **limits), grade

    def episode(self, row: Mapping[str, Any], seed: int) -> ToolEpisode:
        """Creates the episode for a response."""
        return ToolEpisode(self._tools, row, self._grade)


def conversation(row: Mapping[str, Any], added: str = "") -> list[Message]:
    """Returns the messages in a row's `prompt`, which may be a text. `added`, for example the first observation, is added to the last message.

    Raises ValueError if there are no messages, or the last message has no text content.
    """
    prompt = row.get("prompt", "")
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages: list[Message] = [dict(message) for message in prompt]
    if not messages:
        raise ValueError("the row's prompt has no messages")
    if not added:
        return messages
    return [*messages[:-1], {**messages[-1], "content": content_text(messages[-1].get("content")) + added}]
