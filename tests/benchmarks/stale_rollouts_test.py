"""The comparison of ways to train on old tokens: the page made from its metrics."""

import shutil

from benchmarks.stale_rollouts import METRICS_FILE, RESULTS, WAYS, load, show


def test_the_page_has_the_table_and_the_figure_that_its_metrics_make(tmp_path):
    for name in ("README.md", METRICS_FILE):
        shutil.copy(RESULTS / name, tmp_path)
    show(tmp_path)
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text()
    assert (tmp_path / "stale_rollouts.png").stat().st_size > 10_000
    runs = load(RESULTS / METRICS_FILE)
    assert {name for name, _ in runs} == {way.name for way in WAYS}
