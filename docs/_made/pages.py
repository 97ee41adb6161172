"""Pages of which a part is made: `<!-- made: NAME ARGUMENTS -->` in a page stands for the Markdown of a maker."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _made import commands, keys

MARK = re.compile(r"^<!-- made: (\w+)((?: [\w./-]+)*) -->$", re.MULTILINE)


def picture(name: str) -> str:
    """A drawing of ours inside the page, where it takes the colours of the theme."""
    drawing = (Path(__file__).parent.parent / "_static" / name).read_text()
    return f"```{{raw}} html\n{drawing}```"


MAKERS: dict[str, Callable[..., str]] = {
    "command_line": commands.markdown,
    "keys": keys.markdown,
    "keys_beside": keys.markdown_beside,
    "picture": picture,
}


def made(text: str) -> str:
    """The page with every mark replaced.

    Raises:
        KeyError: a mark names no maker.
    """
    return MARK.sub(lambda mark: MAKERS[mark[1]](*mark[2].split()), text)


def _read(app: Any, name: str, content: list[str]) -> None:
    content[0] = made(content[0])


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
