"""Keeps the code readable, its rooms apart, and the house small."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from dapo_jax.config import TrainConfig
from dapo_jax.config.section import leaf_types
from tests import prose
from tests.prose import ROOT, SOURCES, name_of

TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".ipynb", ".sh", ".sbatch", ""}
MACHINE_PATH = re.compile(r"(?<![\w.~>}])/(?:work|root|home|Users|opt|tmp|mnt)/\w")


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
        tree = prose.tree_of(path)
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
    assert len(rooms) <= 30, sorted(rooms)


def test_a_docstring_begins_with_its_subject():
    """It must not begin with a word that continues a missing sentence."""
    found = [
        f"{name_of(path)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in prose.docstrings(prose.tree_of(path))
        if re.match(r"(Of|Those|That|What|As|With)\b", text)
    ]
    assert not found, "\n".join(found)


def lines_of(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_library_tests_and_configuration_are_no_larger_than_their_limits():
    """The limits of the whole. They only fall; a commit that raises one needs a reason."""
    assert lines_of(SOURCES) <= 52_126
    assert lines_of((ROOT / "tests").rglob("*.py")) <= 62_952
    assert len(leaf_types(TrainConfig)) <= 138


LONG_FILES = set[str]()
LONG_FUNCTIONS = {
    "dapo_jax/models/recurrent.py:over_rows",
    "dapo_jax/sampling/gpu_cache.py:_kernel",
    "dapo_jax/sampling/tpu_cache.py:_kernel",
    "dapo_jax/sampling/tpu_cache.py:extend",
}
"""Files of more than 600 lines, and functions of more than 80. Remove an entry with its excess; add none."""


def test_no_file_has_more_than_600_lines():
    assert {name_of(path) for path in SOURCES if lines_of([path]) > 600} == LONG_FILES


def test_no_function_of_run_models_and_sampling_has_more_than_80_lines():
    found = {
        f"{name_of(path)}:{node.name}"
        for room in ("run", "models", "sampling")
        for path in sorted((ROOT / "dapo_jax" / room).rglob("*.py"))
        for node in ast.walk(prose.tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80
    }
    assert found == LONG_FUNCTIONS


def test_a_class_name_is_used_once():
    """Except `Builder`: TensorFlow Datasets asks for this name in the module of each dataset."""
    modules = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(prose.tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name != "Builder":
                modules[node.name].append(name_of(path))
    assert not {name: paths for name, paths in modules.items() if len(paths) > 1}


def test_docstrings_are_free_of_phrases_that_puzzle():
    found = [
        f"{name_of(path)}:{line}: {phrase}"
        for path in SOURCES
        for line, text in prose.docstrings(prose.tree_of(path))
        for phrase in prose.phrases(prose.without_code(text))
    ]
    assert not found, "\n".join(found)


def test_pages_are_free_of_phrases_that_puzzle():
    found = [
        f"{name_of(page)}:{line}: {phrase}"
        for page in prose.PAGES
        for line, text in prose.prose(page.read_text())
        for phrase in prose.phrases(text)
    ]
    assert not found, "\n".join(found)


def test_a_sentence_of_a_page_has_at_most_35_words():
    found = [
        f"{name_of(page)}:{line}: {sentence}"
        for page in prose.PAGES
        for line, sentence in prose.sentences(page.read_text())
        if prose.words(sentence) > prose.LONGEST
    ]
    assert not found, "\n".join(found)


def test_phrases_and_long_sentences_are_found():
    """The three tests above would pass if nothing were looked at."""
    page = (
        "A *list*:\n\n* What is drawn, `what was` aside.\n* "
        + "word " * 36
        + "ends. Short.\n\n```text\nwhat is\n```\n\n| nobody | `x` |\n|---|---|\n"
    )
    found = [(line, phrase) for line, text in prose.prose(page) for phrase in prose.phrases(text)]
    assert found == [(3, "What is"), (3, "drawn"), (10, "nobody")]
    assert [(line, prose.words(text)) for line, text in prose.sentences(page)] == [
        (1, 2), (3, 5), (4, 37), (4, 1), (10, 1), (10, 1),
    ]  # fmt: skip


def test_no_file_names_a_folder_of_one_machine():
    found = {
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    }
    assert not found, "\n".join(sorted(found))
