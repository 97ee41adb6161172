"""Parses the tool calls in a turn, in the formats of the supported model families, which docs/write_an_environment.md lists.

Calls are parsed from text and not from token ids, because an environment has no tokenizer, and some vocabularies, such as SmolLM2's,
have no `<tool_call>` token.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dapo_jax.environments.tool_schemas import misfit
from dapo_jax.text.plain_json import read_numbers
from dapo_jax.text.thoughts import without_thoughts

MOST_CALLS = 16
"""Maximum number of calls in a turn. The first call over this limit becomes a `BrokenCall`, and further calls are ignored."""

_ENDS = {
    "<tool_call>": "</tool_call>", "<tool_calls>": "</tool_calls>", "<|tool_call|>": "<|/tool_call|>", "<function=": "</function>",
    "<function_calls>": "</function_calls>", "<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>",
    "<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>", "<TOOLCALL>": "</TOOLCALL>", "[TOOL_CALLS]": "", "<|python_tag|>": "",
}  # fmt: skip
"""The marks before and after calls. Without a mark after them, calls end with the text."""
_MARKED = rf"(?!<tool_call>\s*<function=|<tool_calls>\s*<tool_call>)(?:{'|'.join(map(re.escape, _ENDS))})"
_HEADER = r"(?:<\|channel\|>\w++)?\s*+(?:<\|constrain\|>)?\w*+\s*+<\|message\|>"
"""Matches the text between a name and its arguments in gpt-oss."""
_UNMARKED = rf'\Afunctools(?=\[)|(?s:\A(?=\{{.*"name")(?=.*"(?:parameters|arguments)"))|\bto=functions\.(?=[\w.-]++{_HEADER})'
_QUOTES = {"<start_function_call>": "<escape>", "<|tool_call>": '<|"|>'}
"""The mark before and after a text in the calls of FunctionGemma and Gemma 4."""
_NAME = re.compile(
    r"[\s;,`]*+(?:\[TOOL_CALLS\])?(?:(?:call:|function<｜tool▁sep｜>)?([\w.-]++)(?:\[CALL_ID\](\w++))?(?:\[ARGS\]|<｜tool▁sep｜>)?"
    rf"(?:{_HEADER})?\s*+(?:```json)?\s*+(?=\{{))?\s*+"
)
"""Matches the name before an object with arguments, if there is one, and the characters around the name."""
_NAME_AND_TAGS = re.compile(r"\s*+([A-Za-z_][\w.-]*+)\s*+(?:(<arg_key>)|</tool_call>)")
_WRAPPER = re.compile(
    r"(?:<(?:seed:)?tool_calls?>|<｜tool▁calls▁begin｜>|(?:<\|end\|>)?(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?)\Z"
)
"""Matches a mark that begins the calls, before the mark of the first call."""
_ERRORS = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


@dataclass(frozen=True)
class ToolCall:
    """A well-formed tool call. The model wrote its name and arguments, so they are untrusted."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False)
    """The id that Mistral's models write in a call, and which the result repeats. Empty without a valid id."""


@dataclass(frozen=True)
class BrokenCall:
    """A malformed tool call, with the reason why it cannot be parsed."""

    reason: str


def tool_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall | BrokenCall]:
    """Returns the calls in a turn's text in order, or an empty list if the turn is a final answer. Calls in thoughts are ignored.

    Args:
        text: the text, with the special tokens that mark calls.
        tools: the schemas of the tools. They give the types of values that are not JSON, and the names with which calls of GLM 4 begin.

    >>> tool_calls('{"name": "add", "parameters": {"a": 1}}')
    [ToolCall(name='add', arguments={'a': 1}, id='')]
    """
    answer, at = without_thoughts(text).strip(), 0
    known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    marks, calls = _marks(known), list[ToolCall | BrokenCall]()
    while len(calls) <= MOST_CALLS and (mark := marks.search(answer, at)):
        at, ends = max(mark.end(), 1), _ENDS.get(mark[0], "")
        try:
            read, at = _read(answer, mark.end(), mark[0], known)
            calls += read
        except _ERRORS as error:
            kind = "it is not JSON: " if isinstance(error, json.JSONDecodeError) else ""
            kind = "it is nested too deeply: " if isinstance(error, RecursionError | MemoryError) else kind
            reason = f"{kind}{error!s:.200}"
            calls.append(BrokenCall(reason if ends in answer[at:] else f"it has no {ends}"))
    if len(calls) <= MOST_CALLS:
        return calls
    return [*calls[:MOST_CALLS], BrokenCall(f"a turn may call at most {MOST_CALLS} times")]


def text_before_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the text of a turn before its first call, without thoughts. For the arguments, see `tool_calls`."""
    answer = without_thoughts(text).strip()
    mark = _marks([tool["function"]["name"] for tool in tools]).search(answer)
    return _WRAPPER.sub("", answer[: mark.start()].rstrip()).rstrip() if mark else answer


def _marks(known: Iterable[str]) -> re.Pattern[str]:
    """Returns the pattern of all marks before calls. `known` has the names of the tools."""
    of_known = rf"\A(?=(?:{'|'.join(map(re.escape, known)) or '(?!)'})\s*\n\s*\{{)"
    return re.compile(f"{_MARKED}|{_UNMARKED}|{of_known}")


def _read(text: str, at: int, mark: str, known: Mapping[str, Any]) -> tuple[list[ToolCall], int]:
    """Returns the calls after `mark`, which ends at `at`, and the index where they end. Raises one of `_ERRORS`."""
    calls: list[ToolCall] = []
    tagged = mark == "<tool_call>" and _NAME_AND_TAGS.match(text, at)
    if tagged or mark in ("<function=", "<function_calls>", *_QUOTES):
        # A parameter may contain the end mark as text.
        tag = "</arg_value>" if tagged else "</parameter>"
        opened = (tagged and tagged[2]) or re.compile(r"[^<>]*>\s*<parameter=").match(text, at)
        before = rf"{tag}\s*" if opened else ""
        last = re.compile(rf"(?={before}{re.escape(_ENDS[mark])})(?:{tag})?").search(text, at)
        if last is None:
            raise ValueError(
                f"it has no {tag} before {_ENDS[mark]}" if opened else f"it has no {_ENDS[mark]}"
            )
        end, content = last.end(), text[at : last.end()].strip()
        if tagged:
            return [_glm_tags(content, known)], end
        if mark == "<function=":
            return [_qwen_parameter_tags(content, known)], end
        if mark == "<function_calls>":
            return _expressions(content), end
        quote = re.escape(_QUOTES[mark])
        text_or_key = rf"(?s:{quote}(.*?){quote})|(?<=[{{,])([\w.-]+)(?=:)"
        content = re.sub(text_or_key, lambda part: json.dumps(part[2] or part[1]), content)
        return _read(content, 0, "", known)[0], end
    while len(calls) <= MOST_CALLS and (named := _NAME.match(text, at)):
        at = json.JSONDecoder().raw_decode(text, named.end())[1]
        value = read_numbers(text[named.end() : at])
        value = {"name": named[1], "arguments": value, "id": named[2]} if named[1] else value
        calls += map(_call, value if isinstance(value, list) and value else [value])
        # The calls end with the text, an end mark, or another special token.
        if text[at:].lstrip(" \n\t;,`")[:1] in ("", "<"):
            break
    return calls, at


def _call(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('it must be an object with a "name" and "arguments"')
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = read_numbers(arguments) if arguments.strip() else None
    if not isinstance(arguments, dict | None):
        raise ValueError('its "arguments" must be an object')
    written = re.fullmatch("[A-Za-z0-9]{9}", str(call.get("id")))
    return ToolCall(call["name"], arguments or {}, written[0] if written else "")


def _qwen_parameter_tags(content: str, known: Mapping[str, Any]) -> ToolCall:
    """Reads `NAME><parameter=KEY>VALUE</parameter>...`, as Qwen3.5 and Qwen3-Coder write it. A value is a text, unless it spells another value that fits the tool's schema."""
    (name, _, between), *parts = (part.partition(">") for part in content.split("<parameter="))
    name = name.strip()
    if between.strip():
        return _call({"name": name, "arguments": between})
    arguments: dict[str, Any] = {}
    for key, _, rest in parts:
        value, ended, after = rest.rpartition("</parameter>")
        if not ended or after.strip():
            raise ValueError("it must be <function=NAME><parameter=KEY>VALUE</parameter></function>")
        value = value[1:].removesuffix("\n") if value.startswith("\n") else value
        arguments[key] = _fitting(value, known.get(name, {}), key)
    return ToolCall(name, arguments)


def _glm_tags(content: str, known: Mapping[str, Any]) -> ToolCall:
    """Reads `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`, as GLM 4.5 and later models write it, with values as in `_qwen_parameter_tags`."""
    name, *parts = content.split("<arg_key>")
    arguments: dict[str, Any] = {}
    for part in parts:
        match = re.fullmatch(r"([^<>]*)</arg_key>\s*<arg_value>(.*)</arg_value>\s*", part, re.DOTALL)
        if match is None:
            raise ValueError("it must be NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
        arguments[match[1]] = _fitting(match[2], known.get(name.strip(), {}), match[1])
    return ToolCall(name.strip(), arguments)


def _fitting(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Returns the value that `text` spells if it is not a text and fits argument `key` of the tool's schema. Otherwise returns `text`."""
    with suppress(*_ERRORS):
        typed = _value(text)
        if not isinstance(typed, str) and not misfit(typed, schema.get("properties", {}).get(key, {}), key):
            return typed
    return text


def _expressions(content: str) -> list[ToolCall]:
    """Reads `NAME(KEY=VALUE, ...)`, one call in each line."""
    calls = []
    for statement in ast.parse(content).body or [None]:
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("it must be NAME(KEY=VALUE, ...)")
        texts = {str(word.arg): ast.get_source_segment(content, word.value) for word in call.keywords}
        values = {key: _value(str(text)) for key, text in texts.items()}
        calls.append(ToolCall(ast.unparse(call.func), values))
    return calls


def _value(text: str) -> Any:
    """Returns the value that JSON or a Python literal spells."""
    try:
        return read_numbers(text)
    except json.JSONDecodeError:
        return read_numbers(json.dumps(ast.literal_eval(text)))
