"""Strips what running leaves in the notebooks of this folder: `python notebooks/strip.py`.

Outputs, counts, timings and the versions of whoever ran them would change with every run.
"""

import json
from pathlib import Path
from typing import Any


def stripped(text: str) -> str:
    """A notebook without outputs and counts, and of its metadata only what a kernel is chosen by.

    Raises:
        ValueError: a cell has no id; the file is of a version before nbformat 4.5.
    """
    notebook = json.loads(text)
    cells = [_stripped_cell(cell) for cell in notebook["cells"]]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _stripped_cell(cell: dict[str, Any]) -> dict[str, Any]:
    if "id" not in cell:
        raise ValueError(f"a cell has no id; save the notebook as nbformat 4.5 first: {cell['source']!r:.80}")
    run = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
    kept = {name: cell[name] for name in ("cell_type", "id", "source")}
    return dict(sorted({**kept, "metadata": {}, **run}.items()))


if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        if (clean := stripped(text)) != text:
            path.write_text(clean, encoding="utf-8")
            print(f"stripped {path.name}")
