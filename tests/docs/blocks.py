"""The pages of the documentation, and the code blocks in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "benchmarks" / "study" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
NO_CODE = ("text", "mermaid")
"""Languages of blocks that are shown and not run."""

_FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL
)
_INDENTED = re.compile(r"(?:^|\n)\n((?:    [^\n]*\n|\n)*    [^\n]*\n?)")
_PYTHON = re.compile(r"^(?:import|from) \w", re.MULTILINE)
_DRAWING = re.compile(r"->|[-+|]{3,}|\d x \w|= \w+ x ")


@dataclass(frozen=True)
class Block:
    """A piece of code of a page."""

    page: Path
    language: str
    """The language of a fence; for an indented block a guess: python, sh, or text."""
    text: str
    fenced: bool = True

    @property
    def name(self) -> str:
        """The path of the page, for names of tests."""
        return str(self.page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Returns all code of a page: in fences, and indented by four."""
    text = page.read_text()
    found = [Block(page, match["language"].strip(), match["text"]) for match in _FENCE.finditer(text)]
    plain = _FENCE.sub("\n", text)
    for match in _INDENTED.finditer(plain):
        inside = "\n".join(line[4:] for line in match[1].splitlines())
        if not _in_a_list(plain, match.start()):
            found.append(Block(page, _looks_like(inside), inside, fenced=False))
    return found


def shell_lines(page: Path) -> list[str]:
    """Returns each command of a page in one line, without comments; commands joined by `&&` are separate."""
    lines = []
    for block in blocks(page):
        if block.language in ("sh", "bash", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                lines += [part for part in _parts(words) if part]
    return [shlex.join(words) for words in lines]


def _parts(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "||"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _in_a_list(text: str, at: int) -> bool:
    """Returns whether the last line of text before belongs to a list, whose items have indented continuations."""
    before = [line for line in text[:at].splitlines() if line.strip() and not line.startswith("    ")]
    return bool(before) and re.match(r"\s*(?:[*-]|\d+\.) |\[\^", before[-1]) is not None


def _looks_like(text: str) -> str:
    if _PYTHON.search(text):
        return "python"
    return "text" if _DRAWING.search(text) else "sh"
