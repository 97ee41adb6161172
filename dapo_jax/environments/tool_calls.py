"""Parses the tool calls in a turn, in the formats of the supported model families (docs/train_tools.md lists them).

Calls are parsed from text and not from token ids, because an environment has no tokenizer, and some vocabularies, such as SmolLM2's,
have no `<tool_call>` token.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dapo_jax.environments.tool_schemas import misfit
from dapo_jax.text.plain_json import read_numbers

MOST_CALLS = 16
"""Maximum number of calls in a turn. The first call over this limit becomes a `BrokenCall`, and further calls are ignored."""

_ENDS = {
    "<tool_call>": "</tool_call>", "<tool_calls>": "</tool_calls>", "<|tool_call|>": "<|/tool_call|>", "<function=": "</function>",
    "<function_calls>": "</function_calls>", "<start_function_call>": "<end_function_call>", "[TOOL_CALLS]": "", "<|python_tag|>": "",
}  # fmt: skip
"""The mark after the calls for each mark before them. If it is empty, the calls end with the text."""
_MARKED = rf"(?!<tool_call>\s*<function=|<tool_calls>\s*<tool_call>)(?:{'|'.join(map(re.escape, _ENDS))})"
_UNMARKED = r'\Afunctools(?=\[)|(?s:\A(?=\{.*"name")(?=.*"parameters"))'
_OF_KNOWN = r"|\A(?=(?:{0})\s*\n\s*\{{|\[(?:{0})\()"
_NAME = re.compile(
    r"\s*+(?:(?:call:)?([\w.-]++)\s*+(?:\[CALL_ID\](\w++))?(?:\[ARGS\])?(?:```json)?\s*+(?=\{))?"
)
"""Matches white space, and the name and id of a call before an object with its arguments. JSON begins at the end of the match."""
_UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


@dataclass(frozen=True)
class ToolCall:
    """A well-formed tool call. The model wrote its name and arguments, so they are untrusted."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False, repr=False)
    """The id that Mistral's models give a call."""


@dataclass(frozen=True)
class BrokenCall:
    """A malformed tool call, with the reason why it cannot be parsed."""

    reason: str


def tool_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall | BrokenCall]:
    """Returns the calls in a turn's text in order, or an empty list if the turn is a final answer. Calls before `</think>` are ignored.

    Args:
        text: the turn's text, with the special tokens that mark calls.
        tools: the schemas of the tools, which give the types of values that are not JSON. Some formats look like an answer. They are only read
            if they begin with the name of a tool.

    >>> tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    >>> tool_calls('{"name": "add", "parameters": {"a": 1}}')
    [ToolCall(name='add', arguments={'a': 1})]
    >>> tool_calls("<tool_call>add</tool_call>")
    [BrokenCall(reason='it is not JSON: Expecting value: line 1 column 1 (char 0)')]
    """
    answer = _after_thoughts(text).strip()
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    of_known = _OF_KNOWN.format("|".join(map(re.escape, known))) if known else ""
    marks = re.compile(f"{_MARKED}|{_UNMARKED}{of_known}")
    found: list[ToolCall | BrokenCall] = []
    mark = marks.search(answer)
    while mark and len(found) <= MOST_CALLS:
        begin, ends = mark.end(), _ENDS.get(mark[0], "")
        # The arguments may contain these marks as text, so the search for the end begins after the JSON value.
        end = answer.find(ends, _after_json(answer, begin)) if ends else -1
        calls = _read(answer[begin : end if end >= 0 else None], mark[0], known)
        is_broken = isinstance(calls[-1], BrokenCall) or (end < 0 and mark[0] == "<function=")
        found += [BrokenCall(f"it has no {ends}")] if ends and end < 0 and is_broken else calls
        mark = marks.search(answer, end if end >= 0 else max(begin, 1) if is_broken else len(answer))
    if len(found) <= MOST_CALLS:
        return found
    return [*found[:MOST_CALLS], BrokenCall(f"a turn may call at most {MOST_CALLS} times")]


def _after_thoughts(text: str) -> str:
    """Returns the text after the model's thinking, or an empty string if the thinking does not end.

    The chat template may write `<think>` as part of the prompt. So a `</think>` without `<think>` also ends the thinking if it precedes all calls.
    """
    before, ended, after = text.partition("</think>")
    opened = text.lstrip().startswith("<think>")
    if ended and (opened or "<tool_call>" not in before):
        return after
    return "" if opened else text


def _read(content: str, mark: str, known: Mapping[str, Any]) -> list[ToolCall | BrokenCall]:
    """Returns the calls after a mark: at least one, which is a `BrokenCall` if the content cannot be read."""
    calls: list[ToolCall | BrokenCall] = []
    try:
        if mark == "<function=":
            return [_spelled(content, known)]
        if re.match(r"\s*+\[?[\w.]++\(", content):
            return _expressions(content.strip())
        if mark == "<start_function_call>":
            text_or_key = r"<escape>(.*?)<escape>|(?<=[{,])([\w.-]+)(?=:)"
            content = re.sub(
                text_or_key, lambda found: json.dumps(found[2] or found[1]), content, flags=re.DOTALL
            )
        while (content or not calls) and len(calls) <= MOST_CALLS:
            named, end = _NAME.match(content), _after_json(content, 0)
            assert named is not None  # every part of the expression is optional
            value = read_numbers(content[named.end() : end or None])
            value = {"name": named[1], "arguments": value, "id": named[2]} if named[1] else value
            calls += map(_call, value if isinstance(value, list) and value else [value])
            content = content[end:].lstrip(" \n\t;,`").removeprefix("[TOOL_CALLS]")
        return calls
    except json.JSONDecodeError as error:
        return [BrokenCall(f"it is not JSON: {error}")]
    except (RecursionError, MemoryError):
        return [BrokenCall("it is nested too deeply")]
    except _UNREADABLE as error:
        return [BrokenCall(f"{error!s:.200}")]


def _after_json(text: str, begin: int) -> int:
    """Returns the index after the JSON value that begins at `begin`, possibly after a name, or `begin` if there is no JSON."""
    named = _NAME.match(text, begin)
    try:
        return json.JSONDecoder().raw_decode(text, named.end() if named else begin)[1]
    except (ValueError, RecursionError):
        return begin


def _call(call: Any) -> ToolCall | BrokenCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return BrokenCall('it must be an object with a "name" and "arguments"')
    given = call.get("arguments", call.get("parameters")) or {}
    if isinstance(given, str):
        given = (read_numbers(given) if given.strip() else None) or {}
    if not isinstance(given, dict):
        return BrokenCall('its "arguments" must be an object')
    return ToolCall(call["name"], given, str(call.get("id") or ""))


def _spelled(content: str, known: Mapping[str, Any]) -> ToolCall:
    """Reads `NAME><parameter=KEY>VALUE</parameter>...`. A value that has the type of the tool's schema is converted, and others are texts."""
    name, _, rest = content.partition(">")
    arguments: dict[str, Any] = {}
    before, *parts = rest.split("<parameter=")
    if before.strip():
        raise ValueError("it must be <function=NAME><parameter=KEY>VALUE</parameter></function>")
    for part in parts:
        key, _, value = part.partition(">")
        value, ended, _ = value.rpartition("</parameter>")
        if not ended:
            raise ValueError(f"parameter {key!r:.80} has no </parameter>")
        arguments[key] = value[1:].removesuffix("\n") if value.startswith("\n") else value
        with suppress(*_UNREADABLE):
            typed = _value(arguments[key])
            schema = known.get(name, {}).get("properties", {}).get(key, {})
            if not isinstance(typed, str) and not misfit(typed, schema, key):
                arguments[key] = typed
    return ToolCall(name.strip(), arguments)


def _expressions(content: str) -> list[ToolCall | BrokenCall]:
    """Reads `NAME(KEY=VALUE, ...)`, several in lines or in a list."""
    calls: list[ToolCall | BrokenCall] = []
    for statement in ast.parse(content).body:
        value = getattr(statement, "value", None)
        for call in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("it is not JSON, nor NAME(KEY=VALUE, ...)")
            texts = {str(each.arg): ast.get_source_segment(content, each.value) for each in call.keywords}
            calls.append(
                ToolCall(ast.unparse(call.func), {key: _value(text or "") for key, text in texts.items()})
            )
    return calls


def _value(text: str) -> Any:
    """Returns the value of JSON or of a Python literal."""
    try:
        return read_numbers(text)
    except json.JSONDecodeError:
        return read_numbers(json.dumps(ast.literal_eval(text)))
