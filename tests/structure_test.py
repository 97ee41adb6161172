"""Keeps the code readable, its rooms apart, and the house small."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import budgets
from tests.budgets import ROOT

SOURCES = sorted((ROOT / "dapo_jax").rglob("*.py"))
ALLOWED = json.loads(budgets.FILE.read_text())
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".ipynb", ".sh", ".sbatch", ""}
MACHINE_PATH = re.compile(r"(?<![\w.~>}])/(?:work|root|home|Users|opt|tmp|mnt)/\w")


def name_of(path):
    return str(path.relative_to(ROOT))


def text_files():
    """Returns every text file of the project, without caches, runs and builds."""
    folders = (
        "dapo_jax", "examples", "tests", "configs", "docs", "notebooks", "launch", "benchmarks", ".ci", ".github",
    )  # fmt: skip
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [path for path in (*inside, *ROOT.glob("*"), *ROOT.glob("constraints/*")) if is_text(path)]


def is_text(path):
    return path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts


def test_no_type_error_is_ignored():
    ignored = re.compile(r"#\s*(?:type|pyrefly|pyright|mypy|ty)\s*:\s*ignore")
    found = [name_of(path) for path in SOURCES if ignored.search(path.read_text())]
    assert not found, f"{found} silence the type checker; write the type instead"


def test_rooms_import_only_from_the_floors_below():
    """The contracts of pyproject.toml, by import-linter."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_is_in_the_layers_contract():
    """A module that no contract knows could import whatever it likes."""
    contract = (ROOT / "pyproject.toml").read_text()
    rooms = {path.relative_to(ROOT / "dapo_jax").parts[0].removesuffix(".py") for path in SOURCES}
    # __init__ offers the light names; testing holds doubles of all rooms.
    missing = [
        room for room in rooms - {"__init__", "__main__", "testing"} if f"dapo_jax.{room}" not in contract
    ]
    assert not missing, f"{sorted(missing)} are not in the layers contract of pyproject.toml"


def imports():
    """Module -> the modules of the package that it imports anywhere, also inside functions."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCES
    }
    found = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text())
        checked = [
            n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
        ]
        types_alone = {id(inner) for one in checked for inner in ast.walk(one)}
        found[name] = {
            f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and id(node) not in types_alone and node.module in modules
            for alias in node.names
        }
    return found


def test_no_modules_import_each_other_in_a_circle():
    """Modules without unresolved imports are removed until only circles are left."""
    left = imports()
    while done := [name for name, wanted in left.items() if not wanted & left.keys() - {name}]:
        for name in done:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def test_the_house_has_few_rooms():
    rooms = {path.relative_to(ROOT / "dapo_jax").parts[0] for path in SOURCES} - {
        "__init__.py",
        "__main__.py",
    }
    assert len(rooms) <= 28, sorted(rooms)


def test_a_docstring_begins_with_its_subject():
    """It must not begin with a word that continues a missing sentence."""
    found = [
        f"{name_of(path)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in budgets.docstrings(ast.parse(path.read_text()))
        if re.match(r"(Of|Those|That|What|As|With)\b", text)
    ]
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def today():
    return budgets.measured()


def test_each_budget_names_the_rooms_and_pages_that_there_are(today):
    """`python tests/budgets.py` adds a new room with today's number, and drops a removed one."""
    for key in ("lines", "banned_phrases_in_docstrings", "banned_phrases_in_pages", "long_sentences"):
        assert ALLOWED[key].keys() == today[key].keys(), f"{key}: run `python tests/budgets.py`"


@pytest.mark.parametrize("room", ALLOWED["lines"])
def test_a_room_has_no_more_lines_than_its_budget(room, today):
    assert today["lines"].get(room, 0) <= ALLOWED["lines"][room]


def test_the_tests_are_little_longer_than_the_library(today):
    assert today["tests_per_library_line"] <= ALLOWED["tests_per_library_line"]


def test_a_configuration_has_few_keys(today):
    assert today["configuration_keys"] <= ALLOWED["configuration_keys"]


def test_a_class_name_is_used_once(today):
    """The exceptions in the budgets only shrink. Each dataset's module has a `Builder`, which TensorFlow Datasets asks for."""
    new = set(today["class_names_used_twice"]) - set(ALLOWED["class_names_used_twice"])
    assert not new, {name: budgets.class_names()[name] for name in new}


@pytest.mark.parametrize("room", ALLOWED["banned_phrases_in_docstrings"])
def test_docstrings_are_free_of_phrases_that_puzzle(room):
    found = budgets.banned_in_room(budgets.sources().get(room, []))
    allowed = ALLOWED["banned_phrases_in_docstrings"][room]
    assert len(found) <= allowed, f"{len(found)} of {allowed} allowed:\n" + "\n".join(found)


@pytest.mark.parametrize("page", ALLOWED["banned_phrases_in_pages"])
def test_pages_are_free_of_phrases_that_puzzle(page):
    found = budgets.banned_in_page(ROOT / page)
    assert len(found) <= ALLOWED["banned_phrases_in_pages"][page], budgets.counted(found)


@pytest.mark.parametrize("page", ALLOWED["long_sentences"])
def test_a_sentence_of_a_page_has_at_most_35_words(page):
    found = budgets.long_sentences(ROOT / page)
    assert len(found) <= ALLOWED["long_sentences"][page], "\n".join(found)


def test_phrases_and_long_sentences_are_found():
    """The counts above would be 0 if nothing were looked at."""
    page = (
        "A *list*:\n\n* What is drawn, `what was` aside.\n* "
        + "word " * 36
        + "ends. Short.\n\n```text\nwhat is\n```\n"
    )
    assert [
        phrase
        for block in budgets.prose(page)
        for phrase in budgets.BANNED
        if re.search(rf"\b(?:{phrase})\b", block.lower())
    ] == [
        budgets.BANNED[0],
        budgets.BANNED[5],
    ]
    assert [budgets.words(sentence) for sentence in budgets.sentences(page)] == [2, 5, 37, 1]
    assert budgets.lowered({"lines": {"a": 3, "b": 2}}, {"lines": {"a": 4, "b": 1, "c": 5}}) == {
        "lines": {"a": 3, "b": 1, "c": 5}
    }


def test_no_file_names_a_folder_of_one_machine():
    found = {
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    }
    assert not found, "\n".join(sorted(found))
