"""The tool calls in a turn, as Qwen and Llama 3 write them.

| model | what it writes |
|---|---|
| Qwen2.5, Qwen3, Hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times, between other text |
| Llama 3 | `{"name": ..., "parameters": {...}}` and nothing else, several with `;` between, perhaps behind `<|python_tag|>` |

They are read from the turn's text and not from its ids: an environment has no tokenizer, and where the vocabulary has no `<tool_call>` (SmolLM2's), or a policy spells it in other
tokens, it is a text like any other.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo_jax.plain_json import read_numbers

MOST_CALLS = 16
"""Calls that a turn may hold; the next one is a `BrokenCall`, and those behind it are not read."""

_BEGIN, _END, _TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """A call that was read."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class BrokenCall:
    """A call that cannot be read, and why."""

    reason: str


def tool_calls(text: str) -> list[ToolCall | BrokenCall]:
    """The calls in a turn's text, in their order; none if it is an answer. Thoughts, up to `</think>`, hold no calls.

    >>> tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    >>> tool_calls('{"name": "add", "parameters": {"a": 1}}')
    [ToolCall(name='add', arguments={'a': 1})]
    >>> tool_calls("<tool_call>add(1)</tool_call>")
    [BrokenCall(reason='it is no JSON: Expecting value: line 1 column 1 (char 0)')]
    """
    said = _behind_thoughts(text).strip()
    found = _tagged(said) if _BEGIN in said else _bare(said)
    if len(found) <= MOST_CALLS:
        return found
    return [*found[:MOST_CALLS], BrokenCall(f"a turn may call at most {MOST_CALLS} times")]


def _behind_thoughts(text: str) -> str:
    """The text behind the thoughts; nothing if they do not end.

    A chat template may have opened them, so the mark of their end is enough, if it comes before the first call.
    """
    before, ended, behind = text.partition("</think>")
    opened = text.lstrip().startswith("<think>")
    if ended and (opened or _BEGIN not in before):
        return behind
    return "" if opened else text


def _tagged(said: str) -> list[ToolCall | BrokenCall]:
    found: list[ToolCall | BrokenCall] = []
    place = said.find(_BEGIN)
    while place >= 0 and len(found) <= MOST_CALLS:
        begin = place + len(_BEGIN)
        # A text among the arguments may hold the marks, too.
        end = said.find(_END, _behind_json(said, begin))
        found.append(BrokenCall(f"it has no {_END}") if end < 0 else _read(said[begin:end], "arguments"))
        place = said.find(_BEGIN, begin if end < 0 else end + len(_END))
    return found


def _bare(said: str) -> list[ToolCall | BrokenCall]:
    meant = said.startswith(_TAG)
    said = said.removeprefix(_TAG).strip()
    # Any other object is an answer in JSON.
    if not meant and not (said.startswith("{") and '"name"' in said and '"parameters"' in said):
        return []
    found: list[ToolCall | BrokenCall] = []
    while said and len(found) <= MOST_CALLS:
        end = _behind_json(said, 0)
        more = said[end:].lstrip()
        whole = end > 0 and more[:1] in ("", ";")
        found.append(_read(said[:end] if whole else said, "parameters"))
        said = more[1:].strip() if whole else ""
    return found


def _behind_json(text: str, begin: int) -> int:
    """The place behind the JSON that begins at `begin`, or `begin` if none does."""
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
        return BrokenCall(f"it is no JSON: {error}")
    except ValueError as error:
        return BrokenCall(str(error))
    except RecursionError:
        return BrokenCall("it has too many brackets inside one another")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return BrokenCall(f'it has to be an object with a "name" and "{usual}"')
    if not isinstance(given, dict):
        return BrokenCall(f'its "{usual}" are no object')
    return ToolCall(call["name"], given)
