"""Formulas as MathML, which browsers draw themselves: no script, nothing fetched when a page is read."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml


def _mathml(node: Any, *, block: bool) -> str:
    # Browsers fit brackets to what is in them; sizes by hand are TeX's.
    text = re.sub(r"\\[bB]igg?[lr]?(?![a-z])", "", node.astext().strip())
    text = re.sub(r"\\texttt\{([^}]*)\}", lambda found: f"\\text{{{found[1]}}}".replace("\\_", "_"), text)
    if block and "\\\\" in text:
        text = f"\\begin{{aligned}}{text}\\end{{aligned}}"
    return latex2mathml.tex2mathml(text, as_block=block)


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
