"""The figures as PNGs: one for each panel, and all on one sheet."""

import sys

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.report import report
from tests.report.made import write_metrics


@pytest.fixture
def few(tmp_path):
    """Metrics of few panels: each takes a third of a second to draw."""
    shares = {"rollout/mixed_frac": 0.5, "rollout/all_correct_frac": 0.5}
    held_out = {"eval/x/avg@8": 0.4, "eval/x/avg@8_stderr": 0.1}
    lines = [{"step": step, **shares, **(held_out if step % 2 else {})} for step in range(1, 5)]
    return write_metrics(tmp_path / "few", *lines)


def test_every_panel_is_a_png_and_all_are_on_one_sheet(few, tmp_path):
    """A metric without a panel, which only one of the runs has, gets its own PNG too."""
    pytest.importorskip("matplotlib", reason="needs the extra report")
    other = write_metrics(tmp_path / "other", {"step": 1, "mine/own": 1.0})
    for runs, more in (([few], []), ([few, other], ["mine_own.png"])):
        written = report(*runs).save_figures(tmp_path / "png")
        names = ["groups_sampled.png", "held_out_accuracy.png", *more, "overview.png"]
        assert sorted(path.name for path in written) == names
        assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in written)


def test_metrics_with_similar_names_have_files_of_their_own(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    metrics = ("custom/a-b", "custom/a_b", "custom/A_b", "overview", "точность")
    run = write_metrics(tmp_path / "run", {"step": 1, "reward/mean": 0.5, **dict.fromkeys(metrics, 1.0)})
    names = ["custom_a_b", "custom_a_b_2", "custom_a_b_2_2", "overview", "overview_2", "reward", "точность"]
    assert sorted(path.stem for path in report(run).save_figures(tmp_path / "png")) == names


def test_a_run_with_only_its_own_metrics_has_no_sheet(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    run = write_metrics(tmp_path / "run", {"step": 1, "mine/own": 1.0})
    assert [path.name for path in report(run).save_figures(tmp_path / "png")] == ["mine_own.png"]


def test_a_legend_with_many_entries_leaves_the_curves_their_room(tmp_path, monkeypatch):
    """Each run has a colour, and each of the 14 parameters a line style. 28 entries, one for each line, were taller than the figure."""
    figure = pytest.importorskip("matplotlib.figure", reason="needs the extra report").Figure
    names, drawn, save = [f"part_{number}" for number in range(14)], list[object](), figure.savefig
    runs = [
        write_metrics(tmp_path / run, *[{"step": step, **{f"update/ratio/{name}": 0.1 for name in names}} for step in (1, 2)])
        for run in ("one", "two")
    ]  # fmt: skip
    monkeypatch.setattr(
        figure, "savefig", lambda self, *args, **more: (save(self, *args, **more), drawn.append(self))
    )
    report(*runs).save_figures(tmp_path / "png")
    axes = [axis for each in drawn for axis in each.axes]
    assert {text.get_text() for text in axes[0].get_legend().texts} == {"one", "two", *names}
    assert all(axis.get_position().height > 0.5 for axis in axes)


def test_a_missing_matplotlib_is_an_error_with_a_remedy(few, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[report\]'"):
        report(few).save_figures(tmp_path / "png")
