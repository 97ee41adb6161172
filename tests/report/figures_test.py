"""The figures as PNGs: one for each panel, and all on one sheet."""

import sys
from importlib.util import find_spec

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.report import report
from tests.report.made import write_metrics

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def few(tmp_path):
    """Metrics of few panels: each takes a third of a second to draw."""
    shares = {"rollout/mixed_frac": 0.5, "rollout/all_correct_frac": 0.5}
    held_out = {"eval/x/avg@8": 0.4, "eval/x/avg@8_stderr": 0.1}
    lines = [{"step": step, **shares, **(held_out if step % 2 else {})} for step in range(1, 5)]
    return write_metrics(tmp_path / "few", *lines)


def names(paths):
    return sorted(path.name for path in paths)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib (extra report) is not installed")
def test_every_panel_is_a_png_and_all_are_on_one_sheet(few, tmp_path):
    written = report(few).save_figures(tmp_path / "png")
    assert names(written) == ["groups_sampled.png", "held_out_accuracy.png", "overview.png"]
    assert all(path.read_bytes().startswith(PNG) for path in written)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib (extra report) is not installed")
def test_a_metric_of_one_run_alone_is_drawn(few, tmp_path):
    """A metric without a panel has its own PNG and is not on the sheet."""
    other = write_metrics(tmp_path / "other", {"step": 1, "mine/own": 1.0})
    written = report(few, other).save_figures(tmp_path / "png")
    assert names(written) == ["groups_sampled.png", "held_out_accuracy.png", "mine_own.png", "overview.png"]


def test_a_missing_matplotlib_is_an_error_with_a_remedy(few, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[report\]'"):
        report(few).save_figures(tmp_path / "png")
