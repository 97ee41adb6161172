"""Tables of Markdown, as a repository and the site show them."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells of Markdown. A line break in one becomes a space, and `<` outside of code and formulas begins no element."""
    lines = [_row(head), "|" + "---|" * len(head), *(_row([_cell(text) for text in row]) for row in rows)]
    return "".join(f"{line}\n" for line in lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    parts = re.split(r"(`[^`]*`|\$[^$`]*\$)", " ".join(text.split()))
    plain = [part if part.startswith(("`", "$")) else part.replace("<", r"\<") for part in parts]
    return "".join(plain).replace("|", r"\|")
