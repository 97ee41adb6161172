"""Finds phrases that puzzle a reader, in docstrings and pages, and sentences of pages that are too long."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "dapo_jax").rglob("*.py"))
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LONGEST = 35
"""Words that a sentence of README or docs may have."""

BANNED = (
    r"what (?:is|was|are|were|has|had)",
    r"(?:says|said|told|tells)",
    r"(?:those|that) of",
    r"(?:is|are) none|(?<!there )are no",
    r"one (?:that|which)",
    r"drawn|draws|drew",
    r"nobody|somebody|whoever",
    r"besides?",
    r"behind",
    r"(?:lie|lies|lay|lying|stand|stands|stood|hangs? off)(?!-)",
    r"(?:go|goes|going|went|gone) on",
    r"(?:of|while) which|which so|but for",
    r"read again|anew|(?:gives?|gave|giving) way",
)
"""Phrases that a reader has to decode; the table at the end of CONTRIBUTING.md has plain words for each."""
_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
_CODE = re.compile(r"(`{1,2})(?!`)((?!\n\s*\n).)+?(?<!`)\1(?!`)", re.DOTALL)
_FORMULA = re.compile(r"\$\$.*?\$\$", re.DOTALL)
_MARKDOWN = MarkdownIt("commonmark").enable("table")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, also below attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        before = node
        for statement in node.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and (
                    before is node or isinstance(before, ast.Assign | ast.AnnAssign)
                ):
                    yield statement.lineno, text
            before = statement


def without_code(text: str) -> str:
    """The text with `code` in place of each piece of code in backticks, single or double."""
    return _CODE.sub("code", text)


def prose(markdown: str) -> list[tuple[int, str]]:
    """Line and text of the paragraphs, headings, list items and table cells of a page, without code, formulas and addresses."""
    text = _FORMULA.sub(lambda formula: "\n" * formula[0].count("\n"), markdown)
    texts = {"text": None, "softbreak": " ", "code_inline": "code"}
    return [
        (
            block.map[0] + 1,
            "".join(texts[part.type] or part.content for part in block.children if part.type in texts),
        )
        for block in _MARKDOWN.parse(text)
        if block.type == "inline" and block.content
    ]


def sentences(markdown: str) -> list[tuple[int, str]]:
    """The sentences of a page, each with the line of its paragraph. A colon or semicolon ends none."""
    found = []
    for number, block in prose(markdown):
        text = re.sub(r"\b(Eq|Fig|al|vs|cf|e\.g|i\.e)\.", r"\1", block)
        found += [(number, sentence) for sentence in re.split(r"(?<=[.!?])[\"')*_]*\s+", text) if sentence]
    return found


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def phrases(text: str) -> list[str]:
    """The phrases of `BANNED` in a text, as they are written there."""
    return [match[0] for match in _BANNED.finditer(text)]
