"""Docstrings are Markdown with Google's headings; autodoc reads reStructuredText. This turns the first into the second."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

_CODE = re.compile(r"(?<![`:\w])`([^`]+)`(?!`)(?=(\w?))")
_FORMULA = re.compile(r"(?<![\\$\w`])\$([^$`]+)\$(?![\w$])")
_LINK = re.compile(r"\[([^\]]+)\]\((https?://[^)]+)\)")

ATTRIBUTES = ("attribute", "data", "property")
COLON = "\N{MODIFIER LETTER COLON}"
"""Stands for a colon in an attribute's text while napoleon looks at it, which takes what is before one for a type."""


def restructured(lines: list[str]) -> list[str]:
    """The docstring with its formulas, tables and code in the words of reStructuredText; examples stay as they are."""
    return list(_blocks(lines))


def _blocks(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        indent = " " * (len(line) - len(line.lstrip()))
        if line.lstrip().startswith(">>>"):
            end = _end(lines, at, lambda text: bool(text.strip()))
            yield from lines[at:end]
        elif line.lstrip().startswith("$$"):
            end = at + 1 if line.strip().endswith("$$") and len(line.strip()) > 2 else _closing(lines, at)
            yield from _formula(" ".join(part.strip() for part in lines[at:end]), indent)
        elif line.lstrip().startswith("|"):
            end = _end(lines, at, lambda text: text.lstrip().startswith("|"))
            yield from _table([_cells(row) for row in lines[at:end]], indent)
        else:
            end = at + 1
            yield _inline(line)
        at = end


def _end(lines: list[str], at: int, goes_on: Any) -> int:
    while at < len(lines) and goes_on(lines[at]):
        at += 1
    return at


def _closing(lines: list[str], at: int) -> int:
    return next(end for end in range(at + 1, len(lines)) if lines[end].rstrip().endswith("$$")) + 1


def _formula(text: str, indent: str) -> list[str]:
    return ["", f"{indent}.. math:: {text.strip().strip('$').strip()}", ""]


def _table(rows: list[list[str]], indent: str) -> Iterator[str]:
    head, body = rows[0], [row for row in rows[1:] if not set("".join(row)) <= set("-: ")]
    yield from ("", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", "")
    for row in (head, *body):
        for place, cell in enumerate(row):
            yield f"{indent}   {'* -' if place == 0 else '  -'} {_inline(cell)}".rstrip()
    yield ""


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _inline(text: str) -> str:
    text = _CODE.sub(lambda found: f"``{found[1]}``" + ("\\ " if found[2] else ""), text)
    text = _FORMULA.sub(lambda found: f":math:`{found[1]}`", text)
    return _LINK.sub(r"`\1 <\2>`__", text)


def _process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured(lines)
    if what in ATTRIBUTES:
        lines[:] = [line.replace(":", COLON) for line in lines]


def _finish(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [line.replace(COLON, ":") for line in lines]


def _legible(
    app: Any, what: str, name: str, thing: Any, options: Any, given: str | None, returned: str | None
) -> Any:
    """Signatures as they stand in the source: `Array`, wherever JAX keeps its class. What a dataclass
    or a protocol has is listed below it."""

    def short(text: str | None) -> str | None:
        return text and text.replace("jaxlib._jax.Array", "Array").replace("[ndarray", "[np.ndarray")

    if what == "class" and (dataclasses.is_dataclass(thing) or getattr(thing, "_is_protocol", False)):
        return "", None
    return short(given), short(returned)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process, priority=100)  # before napoleon, which is at 500
    app.connect("autodoc-process-docstring", _finish, priority=900)
    app.connect("autodoc-process-signature", _legible)
    return {"parallel_read_safe": True}
