"""The comparison of algorithms: the keys of its runs, and the page made from its metrics."""

import shutil
from pathlib import Path

import pytest

from benchmarks.algorithms import METRICS_FILE, RESULTS, overrides, show, summary
from dapo_jax.config import ALGORITHMS, load_config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_keys_that_it_needs(name):
    load_config("quickstart", overrides(name, Path("runs")))


def test_the_teacher_is_the_quickstart_itself():
    assert load_config("quickstart", overrides("teacher", Path("runs"))) == load_config("quickstart")


def test_a_row_has_the_mean_of_the_seeds_and_the_fastest_run(tmp_path):
    """Means of 0.5 and 0.7, and of 1.0 and 3.0 million tokens; the fastest step takes 1.5 s."""
    lines = [
        "algorithm,seed,before,after,tokens,seconds",
        "grpo,0,0.4,0.5,1000000,2.00",
        "grpo,1,0.4,0.7,3000000,1.50",
    ]
    (tmp_path / METRICS_FILE).write_text("\n".join(lines))
    cells = [cell.strip() for cell in summary(tmp_path / METRICS_FILE).splitlines()[-1].split("|")[1:-1]]
    assert cells == ["`grpo`", "0.600", "0.500, 0.700", "2.00", "1.5"]


def test_the_page_has_the_table_that_its_metrics_make(tmp_path):
    for name in ("README.md", METRICS_FILE):
        shutil.copy(RESULTS / name, tmp_path)
    show(tmp_path)
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text()
    assert all(f"| `{name}` " in (RESULTS / "README.md").read_text() for name in ALGORITHMS)
