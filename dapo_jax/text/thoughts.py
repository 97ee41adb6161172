"""Separates a model's answer from its thoughts, between `<think>` and `</think>`."""

import re

_OPEN, _CLOSE = (rf"(?:<{slash}(?i:think|thinking|thought)>|\[{slash}THINK\])" for slash in ("", "/"))
_CALL = r'<tool_call>(?:\s*\{(?:"(?:\\.|[^"\\])*+"|[^"<\\])*+|(?:(?!</?tool_call>).)*+)</tool_call>'
_MARKED = re.compile(rf"(?P<call>{_CALL})|(?P<pair>{_OPEN}.*?(?:{_CLOSE}|\Z))|{_CLOSE}", re.DOTALL)
_MAY_BE_MARKED = re.compile(r"[<\[]/?[Tt]")


def without_thoughts(text: str, prompt: str = "") -> str:
    """Returns a model's text without its thoughts. If `prompt`, the text before it, ends with `<think>`, the text begins with a thought.

    Thoughts may lack an end, and their start if the chat template wrote it. Marks inside a tool call are ordinary text. `[THINK]` is Mistral's mark.

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
