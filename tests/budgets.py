"""What the house may weigh: lines for each room, words that puzzle, long sentences, names used twice.

`tests/budgets.json` has the allowed numbers, and `tests/structure_test.py` compares them with the files. They only fall:

    python tests/budgets.py

lowers each number to today's, adds rooms and pages that are new, and drops those that are gone. To raise a number, edit the file in a
commit that gives the reason.
"""

import ast
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "dapo_jax"
FILE = ROOT / "tests" / "budgets.json"
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


def sources() -> dict[str, list[Path]]:
    """The library's files by room; a module at the root is a room, except `__main__`, which starts `cli`."""
    rooms = defaultdict(list)
    for path in sorted(LIBRARY.rglob("*.py")):
        name = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
        rooms["cli" if name == "__main__" else name].append(path)
    return dict(rooms)


def pages() -> list[Path]:
    """README, CONTRIBUTING and all pages of the site."""
    loose = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
    return [*(ROOT / name for name in loose), *sorted((ROOT / "docs").rglob("*.md"))]


def lines_of(paths) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def docstrings(tree: ast.AST):
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


def class_names() -> dict[str, list[str]]:
    """Each class of the library by name, with the modules that define it."""
    found = defaultdict(list)
    for paths in sources().values():
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return dict(found)


def without_code(text: str) -> str:
    """The text with `code` in place of each piece of code in backticks, single or double."""
    return re.sub(r"(?<!`)(`{1,2})(?!`)((?!\n\s*\n).)+?(?<!`)\1(?!`)", "code", text, flags=re.DOTALL)


def prose(markdown: str) -> list[str]:
    """The paragraphs, list items and table cells of a page, without code, formulas and addresses."""
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|\$\$.*?\$\$", "", text, flags=re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?:    [^\n]*\n|\n)+", "\n", text)  # indented code
    text = without_code(text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]+>", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        item: list[str] = []
        for line in paragraph.splitlines():
            if line.lstrip().startswith("|"):
                blocks += [cell.strip() for cell in re.split(r"(?<!\\)\|", line) if cell.strip(" -:")]
                continue
            if re.match(r"\s*(?:[*-]|\d+\.|#+|\[\^\w+\]:)\s", line):
                blocks.append(" ".join(item))
                item = []
            item.append(line.strip())
        blocks.append(" ".join(item))
    return [block for block in blocks if block]


def sentences(markdown: str) -> list[str]:
    """The sentences of a page. A colon or semicolon ends none."""
    found = []
    for block in prose(markdown):
        text = re.sub(r"\b(Eq|Fig|al|vs|cf|e\.g|i\.e)\.", r"\1", block)
        found += re.split(r"(?<=[.!?])[\"')*_]*\s+", text)
    return [sentence for sentence in found if sentence]


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def long_sentences(page: Path) -> list[str]:
    return [sentence for sentence in sentences(page.read_text()) if words(sentence) > LONGEST]


def banned_in_page(page: Path) -> list[str]:
    return [found[0] for block in prose(page.read_text()) for found in _BANNED.finditer(block)]


def banned_in_room(paths) -> list[str]:
    """Each hit in a docstring, as file:line: phrase. Code in backticks does not count."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {found[0]}"
        for path in paths
        for line, text in docstrings(ast.parse(path.read_text()))
        for found in _BANNED.finditer(without_code(text))
    ]


def measured() -> dict:
    """Today's numbers, in the form of `tests/budgets.json`."""
    from dapo_jax.config import TrainConfig
    from dapo_jax.config.section import leaf_types

    rooms = sources()
    library = lines_of(path for paths in rooms.values() for path in paths)
    by_page = {str(page.relative_to(ROOT)): page for page in pages()}
    return {
        "tests_per_library_line": round(lines_of((ROOT / "tests").rglob("*.py")) / library, 3),
        "configuration_keys": len(leaf_types(TrainConfig)),
        "lines": {room: lines_of(paths) for room, paths in rooms.items()},
        "banned_phrases_in_docstrings": {room: len(banned_in_room(paths)) for room, paths in rooms.items()},
        "banned_phrases_in_pages": {name: len(banned_in_page(page)) for name, page in by_page.items()},
        "long_sentences": {name: len(long_sentences(page)) for name, page in by_page.items()},
        "class_names_used_twice": sorted(name for name, where in class_names().items() if len(where) > 1),
    }


LEAST = {"tests_per_library_line": 1.15, "configuration_keys": 120}
"""Where a number need not fall any further."""


def lowered(allowed: dict, today: dict) -> dict:
    """Today's numbers, but none above the allowed one."""
    new = {}
    for key, value in today.items():
        before = allowed.get(key)
        if isinstance(value, dict):
            new[key] = {name: min(number, (before or {}).get(name, number)) for name, number in value.items()}
        elif isinstance(value, list):
            new[key] = value if before is None else [name for name in value if name in before]
        else:
            new[key] = max(min(value, value if before is None else before), LEAST[key])
    return new


def counted(findings) -> str:
    return ", ".join(f"{phrase} ({number})" for phrase, number in Counter(findings).most_common())


if __name__ == "__main__":
    allowed = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps(lowered(allowed, measured()), indent=2) + "\n")
