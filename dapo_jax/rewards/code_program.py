"""Finds the program in a response. It is never parsed here, because a hostile text can crash Python's parser; the sandbox compiles it."""

import re

from dapo_jax.text.thoughts import without_thoughts

_FENCE = re.compile(r"([^`~]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)(.*+)")  # possessive, so its time is linear
_INDENT = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]+[.)])[ \t]+)?")  # also the mark of a list's item
_PYTHON = ("```python", "```python3", "```py")
_FUTURE = re.compile(
    r"""(?:(?:\s*+(?:#.*+|\"{3}[^"]*+\"{3}|'{3}[^']*+'{3}))*+\s*+from[ \t]+__future__[ \t]+import(?:[ \t]*+\([^)]*+\)|.*+)[^\n]*+\n)*+"""
)
"""Imports from `__future__`, which Python allows only at the start of a program, and the comments and the docstring before them."""
MOST_BYTES = 256 << 10
"""A longer program is not run."""


def program_of(
    response: str, *, prompt: str = "", is_complete: bool = True, name: str = ""
) -> tuple[str, bool]:
    r"""Returns the last Python block of a response, or else the last block without a language, and True. Without blocks, returns the whole text and False.

    Thoughts are ignored. A block that is not closed counts only if the response is complete. A block may contain blocks that name a language, for example in a
    docstring. A Python block may begin after a text in the same line, and a text may follow the end of a block. If `name` is given, blocks that define this
    function or class come first. The text is empty if the response has no program, or a program that is too long.

    >>> program_of("First:\n```python\nprint(1)\n```\nBetter:\n```python\nprint(2)\n```")
    ('print(2)\n', True)
    """
    text = without_thoughts(response, prompt)
    text = text[1:] if text != response and text[:1] == " " else text
    blocks, block, others, fence, indent, depth = list[tuple[str, str]](), "", "", None, 0, 0
    for line in text.splitlines(keepends=True):
        match = _FENCE.fullmatch(line.rstrip())
        indented = match and _INDENT.fullmatch(match[1])
        opens = indented or (match and match[0].lower().endswith(_PYTHON))
        if fence is None and match and opens and "`" not in match[4]:
            fence, block, indent, depth = match, "", len(match[1]) if indented else 0, 1
            continue
        if fence and match and indented and match[2].startswith(fence[2]) and "```" not in match[4]:
            is_python = f"```{match[3].lower()}" in _PYTHON
            is_language = match[3].isalnum() and match[0].endswith(match[2] + match[3])
            depth += 1 if is_python or is_language else -1  # a text or a tag may follow the end
        if fence is None:
            others += line
        elif depth == 0:
            blocks.append((fence[3].lower(), block))
            fence = None
        else:
            block += line if line[:indent].strip() else line[indent:] or "\n"
    if fence is not None and block.strip():
        blocks.append((fence[3].lower(), block if is_complete else ""))
    if blocks:
        marked = [block for language, block in blocks if f"```{language}" in _PYTHON]
        marked = marked or [block for language, block in blocks if not language] or [""]
        others = ([block for block in marked if name and defines(block, name)] or marked)[-1]
    fits = others.strip() and len(others.encode(errors="replace")) <= MOST_BYTES
    return others if fits else "", bool(blocks)


def after_prompt(program: str, prompt: str, name: str) -> str:
    """Returns a program whose first part is code of a prompt. The program may be the whole function `name`, or only its body."""
    if not defines(program, name):
        return prompt + program
    before = prompt.partition(f"def {name}")[0]
    return _FUTURE.sub(lambda future: future[0] + before, program, count=1)


def defines(program: str, name: str) -> bool:
    """Returns whether a program defines a function, a class or a variable of this name, possibly in a class."""
    name = re.escape(name)
    definition = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*="
    return bool(re.search(definition, program, re.MULTILINE))
