"""Separates a model's answer from its thoughts, between `<think>` and `</think>`, or between the marks of another family."""

import re
from collections.abc import Collection

_OPEN = r"(?:<(?i:think|thinking|thought)>|\[THINK\]|<\|channel>thought)"
_CLOSE = r"(?:</(?i:think|thinking|thought)>|\[/THINK\]|<channel\|>)"
_OBJECT = r'\{(?:"(?:\\.|[^"\\])*+"(?=\s*+[,:}\]])|[^"<\\])*+'
_CALL = "|".join([
    r'<tool_call>(?:\s*\{(?:"(?:\\.|[^"\\])*+"|[^"<\\])*+|(?:(?!</?tool_call>).)*+)</tool_call>',
    r"\bto=functions\.[\w.-]++(?:<\|channel\|>\w++)?\s*+(?:<\|constrain\|>)?\w*+\s*+<\|message\|>\s*+" + _OBJECT,
    r"\bto=[\w.-]++<\|channel\|>",
    r"(?:\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>|<TOOLCALL>|<tool_calls>|<｜tool▁call▁begin｜>|<tool_call>(?=\s*+\[)|\A\s*+functools(?=\[))(?:[^{\"<]|<｜){0,200}+" + _OBJECT,
    r"\A\s*+(?:[A-Za-z_][\w.-]*+\n\s*+|(?=\{\s*+\"name\"))" + _OBJECT,
    r"<function(?:=[\w.-]++|_calls)>(?:(?!</?function[=_>]).)*+</function(?:_calls)?>",
    r"<\|tool_call>(?:(?!<\|?tool_call\|?>).)*+<tool_call\|>",
    r"<start_function_call>(?:(?!<(?:start|end)_function_call>).)*+<end_function_call>",
])  # fmt: skip
"""Matches a call in one of the formats of `environments.tool_calls`, at least up to the end of its last text."""
_CHANNEL = r"(?:<\|end\|>)?(?:<\|start\|>assistant)?<\|channel\|>"
_MESSAGE = r"\s*+(?:<\|constrain\|>)?\w*+\s*+<\|message\|>"
_PAIR = rf"{_OPEN}.*?(?:{_CLOSE}|\Z)|{_CHANNEL}analysis{_MESSAGE}.*?(?:<\|end\|>|\Z)|{_CHANNEL}(?:final|commentary){_MESSAGE}"
_MARKED = re.compile(rf"(?P<call>{_CALL})|(?P<pair>{_PAIR})|{_CLOSE}", re.DOTALL)
_MAY_BE_MARKED = re.compile(r"[<\[]/?[Tt]|<\|?channel")
MARKS = frozenset({"<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>"})
"""Marks that begin or end thoughts. Chat templates look for them in earlier answers."""
_CHANNELS = {"<|channel|>", "<|message|>", "<|start|>", "<|end|>"}


def marks_in(tokens: Collection[str]) -> set[str]:
    """Returns the tokens that mark thoughts. In some vocabularies they are special tokens, but without their text, thoughts would be a part of the answer."""
    return {*tokens} & (MARKS | _CHANNELS if "<|channel|>" in tokens else MARKS)


def without_thoughts(text: str, prompt: str = "") -> str:
    """Returns a model's text without its thoughts. If `prompt`, the text before it, ends with `<think>`, the text begins with a thought.

    Thoughts may lack an end, and their start if the chat template wrote it. Marks inside a tool call are ordinary text. `[THINK]` is Mistral's mark,
    `<|channel>thought` Gemma 4's, and `<|channel|>analysis<|message|>` gpt-oss's, whose marks of other channels are removed.

    >>> without_thoughts("<think>7? No.</think>8"), without_thoughts("7? No.</think>8"), without_thoughts("<think>7?")
    (' 8', '8', ' ')
    """
    text = opening(prompt) + text
    if not _MAY_BE_MARKED.search(text):  # This search is much faster than the next one.
        return text
    rest, end = "", 0
    for mark in _MARKED.finditer(text):
        if not mark["call"]:
            rest = f"{rest}{text[end : mark.start()]} " if mark["pair"] else ""
            end = mark.end()
    return rest + text[end:]


def opening(prompt: str) -> str:
    """Returns the mark, such as `<think>`, with which a prompt begins the thoughts of an answer, or an empty string."""
    mark = re.search(rf"({_OPEN})\s*\Z", prompt[-50:])
    return mark[1] if mark else ""
