"""The comparison of algorithms: the keys of its runs, and the page made from its metrics."""

import shutil
from pathlib import Path

import pytest

from benchmarks.algorithms import METRICS_FILE, RESULTS, overrides, show
from dapo_jax.config import ALGORITHMS, load_config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_keys_that_it_needs(name):
    load_config("quickstart", overrides(name, Path("runs")))


def test_the_page_has_the_table_that_its_metrics_make(tmp_path):
    for name in ("README.md", METRICS_FILE):
        shutil.copy(RESULTS / name, tmp_path)
    show(tmp_path)
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text()
    assert all(f"| `{name}` " in (RESULTS / "README.md").read_text() for name in ALGORITHMS)
