"""The notebooks are stripped and run from top to bottom in a kernel.

A real kernel has an event loop, handles interrupts itself, and shows figures, unlike the code of the cells alone.
"""

import ast
import os
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

from notebooks.strip import stripped

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.ipynb"))]
RUN_IN_S = 600
"""For one cell. On two idle cores the longest takes about half a minute; this one may share them."""


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One for all: runs of the same programs find them compiled."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def run(home, tmp_path, monkeypatch):
    """Runs a notebook in a kernel of this Python, in a folder, and returns it with its outputs."""
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(notebook, folder):
        client = NotebookClient(
            notebook,
            timeout=RUN_IN_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        return client.execute(env=environment)

    return run


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_it_is_valid_and_stripped(path):
    text = path.read_text()
    assert stripped(text) == text, (
        f"run `python notebooks/strip.py`: {path.name} has outputs, counts or metadata"
    )
    notebook = read(path)
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert notebook.cells[1].source == read(FOLDER / "loss.ipynb").cells[1].source, "one install cell for all"


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_its_imports_exist(path):
    """Runs the import statements alone."""
    code = [cell.source for cell in read(path).cells if cell.cell_type == "code"]
    tree = ast.parse("".join(map(TransformerManager().transform_cell, code)))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert any(isinstance(node, ast.ImportFrom) and "dapo_jax" in str(node.module) for node in imports)
    exec(compile(ast.Module(imports, []), path.name, "exec"), {})


# Slow: kernels that run for a minute or more. The test above has the imports of all notebooks, and "sampler" runs in a kernel.
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem != "sampler"))
        for path in sorted(FOLDER.glob("*.ipynb"))
    ],
)
def test_it_runs_from_top_to_bottom(path, run):
    before = sorted(FOLDER.iterdir())
    notebook = run(read(path), FOLDER)
    figures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert figures
    assert sorted(FOLDER.iterdir()) == before, "a run must not leave files beside the notebooks"
