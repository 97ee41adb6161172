"""Converts messages to a canonical form, so that the same messages from a data row, an environment or an HTTP request become the same prompt.

| given | canonical |
|---|---|
| a null field, at any depth | removed, because Arrow adds a null for every field that only other objects in the column have |
| `content` as a list of `{"type": "text", "text": ...}` | the concatenated texts |
| no `content`, but tool calls | an empty text as `content` |
| an empty list of `tool_calls` | removed |
| `reasoning`, vLLM's name of `reasoning_content` | both names |
| a call `{"name": ..., "arguments": ...}` | `{"type": "function", "function": {"name": ..., "arguments": ...}}` |
| call arguments as JSON text | the parsed object. Its nulls are kept, because the model wrote them |
| call arguments that are missing or an empty text | an empty object |
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dapo_jax.text.plain_json import read_numbers

DEEPEST = 64
"""Maximum nesting depth of lists and objects."""


def canonical_messages(messages: Iterable[object]) -> list[dict[str, Any]]:
    """Returns the messages in canonical form, each with a string `role` and a string `content`. Unknown fields are kept.

    Convert messages only once, before rendering, because a second call would remove nulls from the parsed arguments.

    >>> canonical_messages([{"role": "user", "name": None, "content": [{"type": "text", "text": "1+1"}]}])
    [{'role': 'user', 'content': '1+1'}]

    Raises ValueError if an entry is not a message, a field has the wrong type, or a call's arguments are not a JSON object.
    """
    return [_message(message, f"message {index}") for index, message in enumerate(messages)]


def content_text(content: object, where: str = "a message") -> str:
    """Returns the text of a message's `content`. Raises ValueError if the content is neither a string nor a list of text parts."""
    if isinstance(content, str):
        return content
    parts = _without_nulls(content)
    if not isinstance(parts, list):
        raise ValueError(f"{where}: 'content' must be a string or a list of text parts; got {content!r:.80}")
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part != {"type": "text", "text": text}:
            raise ValueError(
                f'{where}: \'content\' has the part {part!r:.80}; a part must be {{"type": "text", "text": "..."}}'
            )
    return "".join(part["text"] for part in parts)


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {message!r:.80}; it must be a mapping with 'role' and 'content'")
    message = _without_nulls(message)
    role, content = message.pop("role", None), message.pop("content", None)
    calls = message.pop("tool_calls", [])
    if not isinstance(role, str) or role in ("human", "gpt"):
        renamed = "rename 'from' to 'role', 'value' to 'content', 'human' to 'user' and 'gpt' to 'assistant'"
        raise ValueError(
            f"{where}: 'role' must be a string such as 'user' or 'assistant'; got {role!r:.80}: {renamed}"
        )
    if "function_call" in message:
        raise ValueError(
            f"{where} has 'function_call', OpenAI's former field; write the call as an entry of 'tool_calls'"
        )
    if "reasoning" in message:
        message.setdefault("reasoning_content", message["reasoning"])
    if not isinstance(calls, list):
        raise ValueError(f"{where}: 'tool_calls' must be a list; got {calls!r:.80}")
    content = "" if content is None and calls else content_text(content, where)
    called = {"tool_calls": [_call(call, f"{where}: tool call {at}") for at, call in enumerate(calls)]}
    return {"role": role, "content": content, **message, **(called if calls else {})}


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ValueError(f"{where} is {call!r:.80}; it must be a mapping with 'function'")
    fields = {key: value for key, value in call.items() if key not in ("type", "function")}
    function = call.get("function")
    if function is None:
        function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError(
            f'{where} is {call!r:.80}; a call must be {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}'
        )
    if not isinstance(name := function.get("name"), str):
        raise ValueError(f"{where}: the name of its function must be a string; got {name!r:.80}")
    arguments = written = function.get("arguments", {})
    if isinstance(written, str):
        try:
            arguments = read_numbers(written) if written.strip() else {}
        except (ValueError, RecursionError) as error:
            problem = f"its arguments are not JSON: {error!s:.200}; got {written!r:.80}"
            raise ValueError(f"{where}: {problem}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: its arguments must be a JSON object; got {written!r:.80}")
    ordered = {"name": name, "arguments": {}} | function | {"arguments": arguments}
    return {**fields, "type": "function", "function": ordered}


def _without_nulls(value: Any, depth: int = 0) -> Any:
    """Returns a copy without null fields, in which arrays are lists and numpy numbers are Python numbers. Raises ValueError if nested too deeply."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth == DEEPEST:
        raise ValueError(f"a message is nested more than {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        return {str(key): _without_nulls(item, depth + 1) for key, item in value.items() if item is not None}
    return [_without_nulls(item, depth + 1) for item in value]
