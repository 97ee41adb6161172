"""The glossary names places that exist: modules, and the names that they define."""

import re

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "glossary.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| word ")
]


@pytest.mark.parametrize(("word", "meaning", "place"), ROWS, ids=[row[0] for row in ROWS])
def test_a_word_has_a_sentence_and_a_place_that_exists(word, meaning, place):
    assert meaning.endswith(".")
    paths, _, name = place.partition(": ")
    for path in re.findall(r"`([^`]+)`", paths):
        assert (ROOT / path).exists(), f"{word}: {path} does not exist"
    if name:
        source = (ROOT / paths.strip("`")).read_text()
        defined = rf"^\s*(?:async def|def|class) {name.strip('`')}\b|^{name.strip('`')}\b.*="
        assert re.search(defined, source, re.MULTILINE), f"{word}: {paths} defines no {name}"


def test_no_word_has_two_rows():
    words = [word for row in ROWS for word in row[0].split(", ")]
    assert sorted(words) == sorted(set(words))
