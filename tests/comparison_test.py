"""docs/comparison.md: what it says of this library can be looked up here, and its two tables say what the evidence says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "comparison.md"
TEXT = PAGE.read_text()
WORDS = {"yes", "no", "partly", "not found", "few", "many"}


def cells(line):
    return [cell.strip() for cell in line.strip("| \n").split(" | ")]


def tables():
    """Of both tables: the libraries of the header, and for each label its words by library."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        header, _, *rows = [cells(line) for line in block.splitlines()]
        if "dapo_jax" in header:
            libraries = header[header.index("dapo_jax") :]
            found.append(
                {
                    row[-len(libraries) - 1]: dict(zip(libraries, row[-len(libraries) :], strict=True))
                    for row in rows
                }
            )
    return found


def evidence():
    """For each row its entries: library, its words, the text behind them."""
    sections = re.split(r"^### Row (\d+)\n", TEXT, flags=re.MULTILINE)[1:]
    entry = re.compile(r"^\* ([^:]+): ([a-z; ]+)\. (.+(?:\n  .+)*)", re.MULTILINE)
    return {
        int(number): entry.findall(body) for number, body in zip(sections[::2], sections[1::2], strict=True)
    }


SHORT, LONG = tables()
EVIDENCE = evidence()


@pytest.mark.parametrize(("number", "label"), [*enumerate(LONG, start=1)])
def test_every_cell_is_what_its_evidence_says(number, label):
    assert [(library, words) for library, words, _ in EVIDENCE[number]] == list(LONG[label].items())
    assert {word for words in LONG[label].values() for word in words.split("; ")} <= WORDS
    assert f"| [{number}](#row-{number}) | {label} |" in TEXT


def test_the_short_table_is_a_part_of_the_long_one():
    assert len(SHORT) <= 10
    for label, words in SHORT.items():
        assert words.items() <= LONG[label].items()


@pytest.mark.parametrize("number", [*EVIDENCE])
def test_what_is_cited_of_this_library_exists(number):
    ours = next(text for library, _, text in EVIDENCE[number] if library == "dapo_jax")
    cited = [*re.findall(r"`([\w.]+(?:/[\w./:]+|\.md))`", ours), *re.findall(r"\]\((.+?)\)", ours)]
    assert cited
    for reference in cited:
        path, _, test = reference.partition("::")
        file = (ROOT if "`" + reference in ours else PAGE.parent) / path.partition("#")[0]
        assert file.exists(), reference
        assert not test or re.search(rf"^def {test}\(", file.read_text(), re.MULTILINE), reference


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).exists(), target


def test_the_readme_has_the_short_table():
    short = re.search(r"from here -->\n\n(.*?)\n\n", TEXT, re.DOTALL)
    assert short is not None
    assert short[1] in (ROOT / "README.md").read_text()
