"""Prose of Markdown in lines of one width, so that a change of a sentence is a small change of a page."""

import re
import textwrap
from collections.abc import Iterator

WIDTH = 180
"""Columns of a line. Tables, code, formulas, images and generated parts keep their lines."""
ITEM = re.compile(r"(\s*(?:[*+-]|\d+\.|\[\^\w+\]:) +)(?=\S)")
WHOLE = re.compile(r"\s*(?:\||#|<|\$\$|!\[|:{3}|\[\w+\]:|$)")
FENCE = re.compile(r"\s*(`{3,}|:{3,})")
KEPT = re.compile(r"`[^`]+`|\$[^$`]+\$| (?=(?:[-+*|>#=]|\d+[.)])(?:\s|$))")
"""Text in which a line must not end: code, a formula, and the space before a mark that would begin a list or a heading."""


def wrapped(text: str) -> str:
    """The page with its paragraphs and items in lines of at most `WIDTH` columns, each as long as possible."""
    return "".join(f"{line}\n" for line in _lines(text.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    words, first, rest, fence, verbatim = list[str](), "", "", "", False

    def flush() -> Iterator[str]:
        if words:
            yield from _filled(" ".join(words), first, rest)
            words.clear()

    for line in lines:
        mark = FENCE.match(line)
        if fence or verbatim:
            yield line
            fence = "" if fence and line.strip() == fence else fence
            verbatim = verbatim and line != "<!-- end -->" and not line.rstrip().endswith("$$")
        elif mark or WHOLE.match(line) or (not words and line.startswith("    ") and not ITEM.match(line)):
            yield from flush()
            yield line
            fence = mark[1] if mark else ""
            verbatim = line.startswith("<!-- made: ") or (
                line.startswith("$$") and not line.rstrip().endswith("$$", 2)
            )
        elif item := ITEM.match(line):
            yield from flush()
            first, rest = item[1], " " * (4 if "[^" in item[1] else len(item[1]))
            words.append(line[item.end() :].strip())
        else:
            if not words:
                first = rest = line[: len(line) - len(line.lstrip())]
            words.append(line.strip())
    yield from flush()


def _filled(text: str, first: str, rest: str) -> list[str]:
    whole = KEPT.sub(lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return [line.replace("\0", " ") for line in lines]
