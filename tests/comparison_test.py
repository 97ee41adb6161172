"""docs/comparison.md: its table agrees with its evidence, and files and tests of this library that it cites exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "comparison.md"
TEXT = PAGE.read_text()
WORDS = re.compile(r"yes|no|partly|not found|few|many|\d+[MBT]")


def cells(line):
    return [cell.strip() for cell in line.strip("| \n").split(" | ")]


def table():
    """For each label of the table its words by library."""
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        header, _, *rows = [cells(line) for line in block.splitlines()]
        if "dapo_jax" in header:
            libraries = header[header.index("dapo_jax") :]
            return {
                row[-len(libraries) - 1]: dict(zip(libraries, row[-len(libraries) :], strict=True))
                for row in rows
            }
    raise AssertionError("the page has no table with a column dapo_jax")


def evidence():
    """For each row its entries: library, words, evidence."""
    sections = re.split(r"^### Row (\d+)\n", TEXT, flags=re.MULTILINE)[1:]
    entry = re.compile(r"^\* ([^:]+): ([\w; ]+)\. (.+(?:\n  .+)*)", re.MULTILINE)
    return {
        int(number): entry.findall(body) for number, body in zip(sections[::2], sections[1::2], strict=True)
    }


TABLE = table()
EVIDENCE = evidence()


@pytest.mark.parametrize(("number", "label"), [*enumerate(TABLE, start=1)])
def test_every_cell_agrees_with_its_evidence(number, label):
    assert [(library, words) for library, words, _ in EVIDENCE[number]] == list(TABLE[label].items())
    assert all(WORDS.fullmatch(word) for words in TABLE[label].values() for word in words.split("; "))
    assert f"| [{number}](#row-{number}) | {label} |" in TEXT
