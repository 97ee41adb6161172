"""Parses the tool calls in a turn, in the formats of Qwen and Llama 3.

| model | format |
|---|---|
| Qwen2.5, Qwen3, Hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, between other text |
| Llama 3 | `{"name": ..., "parameters": {...}}`, or several calls separated by `;`, optionally after `<|python_tag|>`, without other text |

Calls are parsed from text and not from token ids, because an environment has no tokenizer, and some vocabularies, such as SmolLM2's,
have no `<tool_call>` token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo_jax.text.plain_json import read_numbers
from dapo_jax.text.thoughts import without_thoughts

MOST_CALLS = 16
"""Maximum number of calls in a turn. The first call over this limit becomes a `BrokenCall`, and further calls are ignored."""

_BEGIN, _END, _TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """A well-formed tool call. The model wrote its name and arguments, so they are untrusted."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class BrokenCall:
    """A malformed tool call, with the reason why it cannot be parsed."""

    reason: str


def tool_calls(text: str) -> list[ToolCall | BrokenCall]:
    """Returns the calls in a turn's text in order, or an empty list if the turn is a final answer. Calls in thoughts are ignored.

    >>> tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    >>> tool_calls('{"name": "add", "parameters": {"a": 1}}')
    [ToolCall(name='add', arguments={'a': 1})]
    >>> tool_calls("<tool_call>add(1)</tool_call>")
    [BrokenCall(reason='it is not JSON: Expecting value: line 1 column 1 (char 0)')]
    """
    answer = without_thoughts(text).strip()
    found = _tagged(answer) if _BEGIN in answer else _bare(answer)
    if len(found) <= MOST_CALLS:
        return found
    return [*found[:MOST_CALLS], BrokenCall(f"a turn may call at most {MOST_CALLS} times")]


def _tagged(text: str) -> list[ToolCall | BrokenCall]:
    found: list[ToolCall | BrokenCall] = []
    place = text.find(_BEGIN)
    while place >= 0 and len(found) <= MOST_CALLS:
        begin = place + len(_BEGIN)
        # The arguments may contain these tags as text, so the search for the end tag begins after the JSON value.
        end = text.find(_END, _after_json(text, begin))
        found.append(BrokenCall(f"it has no {_END}") if end < 0 else _read(text[begin:end], "arguments"))
        place = text.find(_BEGIN, begin if end < 0 else end + len(_END))
    return found


def _bare(text: str) -> list[ToolCall | BrokenCall]:
    meant = text.startswith(_TAG)
    text = text.removeprefix(_TAG).strip()
    # A JSON object without these keys is a final answer, not a call.
    if not meant and not (text.startswith("{") and '"name"' in text and '"parameters"' in text):
        return []
    found: list[ToolCall | BrokenCall] = []
    while text and len(found) <= MOST_CALLS:
        end = _after_json(text, 0)
        more = text[end:].lstrip()
        whole = end > 0 and more[:1] in ("", ";")
        found.append(_read(text[:end] if whole else text, "parameters"))
        text = more[1:].strip() if whole else ""
    return found


def _after_json(text: str, begin: int) -> int:
    """Returns the index after the JSON value that begins at `begin`, or `begin` if there is no JSON."""
    start = begin + len(text[begin:]) - len(text[begin:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return begin


def _read(content: str, usual: str) -> ToolCall | BrokenCall:
    try:
        call = read_numbers(content)
        names = [name for name in ("arguments", "parameters") if isinstance(call, dict) and name in call]
        given = call[names[0]] if names else {}
        if isinstance(given, str):
            given = read_numbers(given)
    except json.JSONDecodeError as error:
        return BrokenCall(f"it is not JSON: {error}")
    except ValueError as error:
        return BrokenCall(str(error))
    except RecursionError:
        return BrokenCall("it is nested too deeply")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return BrokenCall(f'it must be an object with a "name" and "{usual}"')
    if not isinstance(given, dict):
        return BrokenCall(f'its "{usual}" must be an object')
    return ToolCall(call["name"], given)
