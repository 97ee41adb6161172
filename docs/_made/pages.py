"""Pages of which a part is made.

What stands between `<!-- made: NAME ARGUMENTS -->` and `<!-- end -->` is the Markdown of a maker; `python docs/renew.py` writes it into
the page, so that a checkout shows what the site shows.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _made import algorithms, commands, keys

DOCS = Path(__file__).parent.parent
MADE = re.compile(
    r"^(?P<mark><!-- made: (?P<name>\w+)(?P<arguments>(?: [\w./-]+)*) -->)\n(?:(?!<!-- made:).)*?^(?P<end><!-- end -->)$",
    re.MULTILINE | re.DOTALL,
)
DRAWING = re.compile(r"^!\[[^\]\n]*\]\(_static/([\w-]+\.svg)\)$", re.MULTILINE)

MAKERS: dict[str, Callable[..., str]] = {
    "algorithms": algorithms.markdown,
    "algorithms_ground": algorithms.ground,
    "algorithms_not_offered": algorithms.not_offered,
    "command_line": commands.markdown,
    "keys": keys.markdown,
    "keys_beside": keys.markdown_beside,
}


def pages() -> list[Path]:
    """The pages of which a part is made."""
    return [page for page in sorted(DOCS.rglob("*.md")) if "<!-- made: " in page.read_text(encoding="utf-8")]


def made(text: str) -> str:
    """The page with every generated part renewed.

    Raises:
        KeyError: a mark names no maker.
        ValueError: a mark has no end.
    """
    whole = len(MADE.findall(text))
    if whole != text.count("<!-- made: ") or whole != text.count("<!-- end -->"):
        raise ValueError("each <!-- made: ... --> needs an <!-- end --> of its own, both alone on their line")
    return MADE.sub(
        lambda part: f"{part['mark']}\n\n{MAKERS[part['name']](*part['arguments'].split())}\n{part['end']}",
        text,
    )


def drawn(text: str) -> str:
    """The page with its drawings inside instead of beside it, where they take the colours of the theme."""
    return DRAWING.sub(
        lambda image: f"```{{raw}} html\n{(DOCS / '_static' / image[1]).read_text(encoding='utf-8')}```", text
    )


def _read(app: Any, name: str, content: list[str]) -> None:
    content[0] = drawn(content[0])


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
