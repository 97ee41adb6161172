"""An environment of tools: Python functions that the policy may call, and a grade for its answer.

A turn with calls gets their results, as messages of the role `tool`. A turn without calls is the answer and ends the episode. An error
in a call is returned to the policy, which may continue: a malformed call, an unknown tool, wrong arguments, a tool that raises or takes
too long.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.environments.calls import outcome
from dapo_jax.environments.protocol import Context, Message, Step, Turn
from dapo_jax.environments.tool_calls import BrokenCall, ToolCall, tool_calls
from dapo_jax.environments.tool_schemas import schema_of, what_is_wrong
from dapo_jax.rewards.async_calls import ends_in_time
from dapo_jax.rewards.functions import as_verdict
from dapo_jax.text.messages import content_text

Grade = Callable[[str, Mapping[str, Any]], Any]
"""grade(text of the answer, row) -> a bool, a number or a Verdict, like a reward function; with `def` or `async def`."""

MOST_CHARACTERS = 8192
"""Default length of the longest result of a call. The rest is cut off, and the text ends with the number of characters cut."""


class Tools:
    """Functions by name, with their schemas; calls them and turns results into text."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        most_characters: int = MOST_CHARACTERS,
        timeout_s: float = 10.0,
    ) -> None:
        """Reads the functions' schemas.

        Args:
            functions: the tools. A function without `async def` runs in a thread of its own.
            most_characters: length of the longest result of a call.
            timeout_s: seconds per call. All calls of a turn together have `environment.timeout_s`, after which the episode is lost.

        Raises:
            ValueError: a function cannot be a tool, or two have the same name.
        """
        self.schemas = [schema_of(function) for function in functions]
        names = [schema["function"]["name"] for schema in self.schemas]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are named {twice[0]!r}; a call could mean either")
        self._functions = dict(zip(names, functions, strict=True))
        parameters = [schema["function"]["parameters"] for schema in self.schemas]
        self._parameters = dict(zip(names, parameters, strict=True))
        self._most_characters, self._timeout_s = most_characters, timeout_s

    async def result(self, call: ToolCall | BrokenCall) -> tuple[str, bool]:
        """Returns the text of a call's result, and whether it is an error."""
        text, error = await self._outcome(call)
        text = f"error: {error}" if error else text
        if (left_out := len(text) - self._most_characters) > 0:
            text = f"{text[: self._most_characters]}\n({left_out:,} more characters were cut off)"
        return text, bool(error)

    async def _outcome(self, call: ToolCall | BrokenCall) -> tuple[str, str]:
        """Returns the text of a call's result and an empty text, or an empty text and the error."""
        if isinstance(call, BrokenCall):
            return "", f"the call cannot be read: {call.reason}"
        if call.name not in self._functions:
            return "", f"there is no tool {call.name!r:.80}; there are {sorted(self._functions)}"
        if wrong := what_is_wrong(call.arguments, self._parameters[call.name]):
            return "", f"{call.name}: {wrong}"
        task = asyncio.ensure_future(outcome(partial(self._functions[call.name], **call.arguments)))
        try:
            is_in_time = await ends_in_time(task, self._timeout_s)
        finally:
            task.cancel()
        if not is_in_time:
            return "", f"{call.name}: no result within {self._timeout_s:g} s"
        found, error = task.result()
        text = found if error is None else f"{type(error).__name__}: {error!s:.500}"
        try:
            text = str(text) if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
            text.encode("utf-8")  # half of a surrogate pair is not text
        except (TypeError, ValueError, RecursionError):
            return "", f"{call.name} returned a {type(found).__name__} that cannot become text"
        return (text, "") if error is None else ("", f"{call.name}: {text}")


class ToolEpisode:
    """An episode of tools, made by a `ToolEnvironment`; a subclass may replace `finish`, which grades the answer."""

    def __init__(self, tools: Tools, row: Mapping[str, Any], grade: Grade | None = None) -> None:
        """Keeps the arguments: the row's `prompt` is a question or messages, and leave `grade` out if a subclass replaces `finish`."""
        self.tools, self.row, self._grade = tools, row, grade
        self.calls, self.errors = 0, 0

    async def start(self) -> Context:
        """Returns the row's conversation, with the tools for the chat template."""
        return Context(conversation(self.row), tools=self.tools.schemas)

    async def step(self, turn: Turn) -> Step:
        """Returns the results of the turn's calls, or the end of the episode if there are no calls."""
        found = tool_calls(turn.text)
        if not found:
            ended = await self.finish(turn)
            metrics = {**self.metrics(), **ended.metrics}
            return Step(reward=ended.reward, done=True, correct=ended.correct, metrics=metrics)
        messages: list[Message] = []
        for call in found:  # one after another, since a call may depend on the call before
            text, is_error = await self.tools.result(call)
            self.calls, self.errors = self.calls + 1, self.errors + is_error
            named = {"name": call.name} if isinstance(call, ToolCall) and not is_error else {}
            messages.append({"role": "tool", **named, "content": text})
        return Step(append=messages, metrics=self.metrics())

    async def finish(self, turn: Turn) -> Step:
        """Returns the grade of the answer: `reward`, `correct`, `metrics`.

        Raises:
            ValueError: `grade` is missing or returned no verdict.
        """
        if self._grade is None:
            raise ValueError(
                "an episode of tools needs an argument `grade`, or a subclass with a method `finish`"
            )
        given, error = await outcome(self._grade, turn.text, self.row)
        if error is not None:
            raise error
        verdict: Verdict = as_verdict(given, name="grade")
        reward = float(verdict.correct) if verdict.score is None else verdict.score
        return Step(reward=reward, correct=verdict.correct, metrics=verdict.parts)

    def metrics(self) -> dict[str, float]:
        """Returns the number of calls, `tool_calls`, and of calls with an error, `tool_errors`."""
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}


class ToolEnvironment:
    """Functions that the policy may call, and a grade for its answer."""

    def __init__(self, functions: Sequence[Callable[..., Any]], grade: Grade, **limits: Any) -> None:
        """Reads the functions' schemas; `Tools` describes `limits` and errors."""
        self._tools, self._grade = Tools(functions, **limits), grade

    def episode(self, row: Mapping[str, Any], seed: int) -> ToolEpisode:
        """Returns the episode of a response."""
        return ToolEpisode(self._tools, row, self._grade)


def conversation(row: Mapping[str, Any], added: str = "") -> list[Message]:
    """Returns the messages of a row: its `prompt`, or a user's message if the prompt is a text.

    Args:
        row: the row of the data.
        added: text to add to the last message, such as the first observation.

    Raises:
        ValueError: there are no messages, or the last message has no text to add to.
    """
    asked = row.get("prompt", "")
    messages = (
        [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(one) for one in asked]
    )
    if not messages:
        raise ValueError("the row's prompt has no messages")
    if not added:
        return [*messages]
    return [*messages[:-1], {**messages[-1], "content": content_text(messages[-1].get("content")) + added}]
