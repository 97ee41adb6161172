"""An environment of tools: Python functions that the policy may call, and a grade for its answer.

A turn with calls gets their results, as messages of the role `tool`; a turn without is the answer, and ends the episode. Whatever is wrong with a call, the
policy is told, and goes on: a call that cannot be read, a tool that is not there, arguments that do not fit, a tool that raises or takes too long.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.environments.protocol import Context, Message, Step, Turn
from dapo_jax.environments.tool_calls import BrokenCall, ToolCall, tool_calls
from dapo_jax.environments.tool_schemas import schema_of, what_is_wrong
from dapo_jax.rewards.functions import as_verdict
from dapo_jax.text.messages import content_text

Grade = Callable[[str, Mapping[str, Any]], Any]
"""From the answer's text and the row to a bool, a number or a Verdict, as reward functions return them; `async def` or not."""

MOST_CHARACTERS = 8192
"""The longest text that a call gives, unless the environment says another; the rest is left out, and the policy is told how much."""


class Tools:
    """Functions by their names, with their schemas, and how a call of one comes to a text."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        most_characters: int = MOST_CHARACTERS,
        timeout_s: float = 10.0,
    ) -> None:
        """Reads the functions' schemas.

        Args:
            functions: the tools; one that is no `async def` runs in a thread of its own.
            most_characters: the longest text that a call gives.
            timeout_s: seconds for one call. All of a turn's calls share `environment.timeout_s`, beyond which the episode is lost.

        Raises:
            ValueError: a function that cannot be a tool, or two of one name.
        """
        self.schemas = [schema_of(function) for function in functions]
        names = [schema["function"]["name"] for schema in self.schemas]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are named {twice[0]!r}; a call could mean either")
        self._functions = dict(zip(names, functions, strict=True))
        self._parameters = {
            schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas
        }
        self._most_characters, self._timeout_s = most_characters, timeout_s

    async def result(self, call: ToolCall | BrokenCall) -> tuple[str, bool]:
        """The text that a call gives, and whether it is an error's."""
        if isinstance(call, BrokenCall):
            return self._bounded(f"error: the call cannot be read: {call.reason}"), True
        if call.name not in self._functions:
            return self._bounded(
                f"error: there is no tool {call.name!r:.80}; there are {sorted(self._functions)}"
            ), True
        if wrong := what_is_wrong(call.arguments, self._parameters[call.name]):
            return self._bounded(f"error: {call.name}: {wrong}"), True
        found, error = await self._called(self._functions[call.name], call.arguments)
        text = error or _text(found)
        if text is None or not _is_unicode(text):
            return f"error: {call.name} gave a {type(found).__name__} that no text can be made of", True
        return self._bounded(f"error: {call.name}: {text}" if error else text), bool(error)

    async def _called(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, str]:
        """The result of a function, or why there is none."""

        async def whole() -> tuple[Any, str]:
            try:
                is_async = inspect.iscoroutinefunction(function)
                found = function(**arguments) if is_async else await asyncio.to_thread(function, **arguments)
                return await found if inspect.isawaitable(found) else found, ""
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # SystemExit among them: it is the tool's affair alone
                return None, f"{type(error).__name__}: {_said(error)}"

        task = asyncio.ensure_future(whole())
        try:
            done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            if not task.done():
                task.cancel()
        if not done:
            return None, f"no result within {self._timeout_s:g} s"
        return (None, "it was cancelled") if task.cancelled() else task.result()

    def _bounded(self, text: str) -> str:
        left_out = len(text) - self._most_characters
        if left_out <= 0:
            return text
        return f"{text[: self._most_characters]}\n({left_out:,} more characters are left out)"


class ToolEpisode:
    """An episode of tools: `finish` says what the answer is worth. To be derived from, or made by a `ToolEnvironment`."""

    def __init__(self, tools: Tools, row: Mapping[str, Any], grade: Grade | None = None) -> None:
        """Begins it.

        Args:
            tools: what the policy may call.
            row: of the data; its `prompt` is a question or messages.
            grade: what the answer is worth; None if `finish` is another's.
        """
        self.tools, self.row, self._grade = tools, row, grade
        self.calls, self.errors = 0, 0

    async def start(self) -> Context:
        """The row's conversation, with the tools told of as the chat template does."""
        return Context(conversation(self.row), tools=self.tools.schemas)

    async def step(self, turn: Turn) -> Step:
        """The results of the turn's calls; of a turn without any, the end."""
        found = tool_calls(turn.text)
        if not found:
            ended = await self.finish(turn)
            metrics = {**self.metrics(), **ended.metrics}
            return Step(reward=ended.reward, done=True, correct=ended.correct, metrics=metrics)
        messages: list[Message] = []
        for call in found:  # one after another: what one does, the next one finds
            text, is_error = await self.tools.result(call)
            self.calls, self.errors = self.calls + 1, self.errors + is_error
            named = {"name": call.name} if isinstance(call, ToolCall) and not is_error else {}
            messages.append({"role": "tool", **named, "content": text})
        return Step(append=messages, metrics=self.metrics())

    async def finish(self, turn: Turn) -> Step:
        """The worth of the answer: `reward`, `correct`, `metrics`.

        Raises:
            ValueError: the grade is none.
        """
        if self._grade is None:
            raise ValueError("an episode of tools needs a grade, or a method finish of its own")
        if inspect.iscoroutinefunction(self._grade):
            given = await self._grade(turn.text, self.row)
        else:
            given = await asyncio.to_thread(self._grade, turn.text, self.row)
            given = await given if isinstance(given, Awaitable) else given
        verdict: Verdict = as_verdict(given, name="grade")
        reward = float(verdict.correct) if verdict.score is None else verdict.score
        return Step(reward=reward, correct=verdict.correct, metrics=verdict.parts)

    def metrics(self) -> dict[str, float]:
        """`tool_calls`, and those among them that came to an error."""
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}


class ToolEnvironment:
    """Functions that the policy may call, and what its answer is worth."""

    def __init__(self, functions: Sequence[Callable[..., Any]], grade: Grade, **limits: Any) -> None:
        """Reads the functions' schemas; `limits` and what is raised are those of `Tools`."""
        self._tools, self._grade = Tools(functions, **limits), grade

    def episode(self, row: Mapping[str, Any], seed: int) -> ToolEpisode:
        """The episode of a response."""
        return ToolEpisode(self._tools, row, self._grade)


def conversation(row: Mapping[str, Any], added: str = "") -> list[Message]:
    """The messages that a row asks: its `prompt`, or a user's message of it if it is a text.

    Args:
        row: of the data.
        added: put behind the last message, such as the first observation.

    Raises:
        ValueError: there is no prompt, it is neither, or its last message has no text to add to.
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


def _text(value: Any) -> str | None:
    """The text of a tool's result: as it is, or as JSON; None if there is none."""
    if isinstance(value, str):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _said(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:
        return "(it has no text)"
