"""Formulas as MathML, which browsers draw themselves: no script, nothing fetched when a page is read."""

import re
import unicodedata
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml


def plain(text: str, *, block: bool) -> str:
    """A formula in the words that docutils translates."""
    text = re.sub(
        r"\\([bB]igg?[lr]?|textstyle)(?![a-z])", "", text.strip()
    )  # browsers fit brackets to what is in them
    # A letter with its hat is one letter, or its index would stand below both.
    text = re.sub(
        r"\\hat\s*\{?(\w)\}?", lambda found: unicodedata.normalize("NFC", f"{found[1]}\u0302"), text
    )
    text = re.sub(r"\\texttt\{([^}]*)\}", lambda found: f"\\text{{{found[1]}}}".replace("\\_", "_"), text)
    if block:
        text = text.replace("\\qquad", "\\\\")  # side by side they are wider than a page
    return f"\\begin{{aligned}}{text}\\end{{aligned}}" if block and "\\\\" in text else text


def _mathml(node: Any, *, block: bool) -> str:
    return latex2mathml.tex2mathml(plain(node.astext(), block=block), as_block=block)


def inline(writer: Any, node: nodes.math) -> None:
    """`$x$`."""
    writer.body.append(_mathml(node, block=False))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    """`$$x$$`."""
    writer.body.append(f'<div class="formula">{_mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
