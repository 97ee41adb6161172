"""The figures as PNGs: one for each panel, and all on one sheet."""

import sys

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.report import report
from tests.report.made import write_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def made(tmp_path):
    return report(write_run(tmp_path / "a", steps=12), write_run(tmp_path / "b", steps=6, seed=1))


def test_every_panel_is_a_png_and_all_are_on_one_sheet(made, tmp_path):
    pytest.importorskip("matplotlib")
    written = made.save_figures(tmp_path / "png")
    assert len(written) == 1 + len(made.panels)
    assert len({path.name for path in written}) == len(written)
    assert {"overview.png", "held_out_accuracy.png", "time_of_a_step.png"} <= {path.name for path in written}
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_a_metric_of_one_run_alone_is_drawn(tmp_path):
    """A stack too: of several runs only its first layer is drawn."""
    pytest.importorskip("matplotlib")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "mine/own": 1.0}\n')
    made = report(bare, write_run(tmp_path / "a", steps=2))
    assert len(made.save_figures(tmp_path / "png")) == 1 + len(made.panels)


def test_without_matplotlib_it_is_said_how_to_get_it(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'dapo_jax\[report\]'"):
        made.save_figures(tmp_path / "png")
