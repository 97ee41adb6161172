"""What keeps the code readable and its rooms apart."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from dapo_jax.config import TrainConfig
from dapo_jax.config.section import leaf_types

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "dapo_jax").rglob("*.py"))
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".ipynb", ".sh", ".sbatch", ""}
MACHINE_PATH = re.compile(r"(?<![\w.~>}])/(?:work|root|home|Users|opt|tmp|mnt)/\w")


def name_of(path):
    return str(path.relative_to(ROOT))


def text_files():
    """Every file of ours that a person could read: no caches, no runs, no builds."""
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
    assert not found, f"{found} silence the type checker; say the type instead"


def test_rooms_import_only_from_the_floors_below():
    """The contracts of pyproject.toml, by import-linter."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_stands_on_a_floor():
    """A module that no contract knows could import whatever it likes."""
    contract = (ROOT / "pyproject.toml").read_text()
    rooms = {path.relative_to(ROOT / "dapo_jax").parts[0].removesuffix(".py") for path in SOURCES}
    # __init__ offers the light names; testing holds doubles that may stand in for anything.
    loose = [room for room in rooms - {"__init__", "testing"} if f"dapo_jax.{room}" not in contract]
    assert not loose, f"{sorted(loose)} are on no floor of the layers contract in pyproject.toml"


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
    """Modules whose imports are all done are taken away until none is left, or only circles are."""
    left = imports()
    while done := [name for name, wanted in left.items() if not wanted & left.keys() - {name}]:
        for name in done:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def test_the_house_has_few_rooms():
    rooms = {path.relative_to(ROOT / "dapo_jax").parts[0] for path in SOURCES} - {"__init__.py"}
    assert len(rooms) <= 28, sorted(rooms)


def docstrings(tree):
    """Line and text of every docstring, those below attributes among them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        before = node
        for statement in node.body:
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if (text and isinstance(before, ast.Assign | ast.AnnAssign)) or (text and before is node):
                yield statement.lineno, statement.value.value
            before = statement


def test_a_docstring_begins_with_the_thing_it_speaks_of():
    """Not with a word that continues a sentence which is not there."""
    found = [
        f"{name_of(path)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in docstrings(ast.parse(path.read_text()))
        if isinstance(text, str) and re.match(r"(Of|Those|That|What|As|With)\b", text)
    ]
    assert not found, "\n".join(found)


def test_no_file_names_a_folder_of_one_machine():
    found = {
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    }
    assert not found, "\n".join(sorted(found))


def test_the_configuration_has_at_most_120_keys():
    """A key that no published run, configuration or how-to sets differently becomes a constant."""
    keys = leaf_types(TrainConfig)
    assert len(keys) <= 120, f"{len(keys)} keys: {', '.join(keys)}"
