"""Which panels a report has: those of which some run has a metric."""

import random
import re

from dapo_jax.report.filling import OTHER, panels_of
from dapo_jax.report.panels import PANELS
from dapo_jax.report.tables import Table
from dapo_jax.trackers import read_metrics
from tests.report.made import metrics_line
from tests.structure_test import ROOT


def table(*lines):
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    return Table(
        axes={"step": [line["step"] for line in lines]},
        columns={name: [line.get(name) for line in lines] for name in names},
    )


def titles(panels):
    return [panel.title for panel in panels]


def test_a_metric_that_no_run_has_leaves_no_panel():
    panels, _ = panels_of([table({"step": 1, "policy/entropy": 0.5}), table({"step": 1, "update/loss": 0.5})])
    assert titles(panels) == ["Entropy", "Loss"]
    assert [series.key for panel in panels for series in panel.series] == ["policy/entropy", "update/loss"]


def test_every_metric_of_a_real_run_is_drawn_once():
    lines = read_metrics(ROOT / "docs/results/smollm2_135m_arithmetic/metrics.jsonl")
    panels, zero = panels_of([table(*lines)])
    drawn = [series.key for panel in panels for series in panel.series]
    drawn += [series.band for panel in panels for series in panel.series if series.band]
    assert len(drawn) == len(set(drawn))
    left = {name for line in lines for name in line} - set(drawn) - {"step"}
    # The parts of other things, and what is 0 throughout.
    assert left == {"time/step_s", "time/eval_s", "update/skipped_frac"}
    assert zero == ["Skipped updates"]


def test_patterns_name_metrics_that_runs_write():
    """A metric that was renamed would silently lose its panel."""
    written = set(metrics_line(5, random.Random(0))) | {
        "reward/parts/math", "reward/lost", "reward/nonfinite", "policy/kl_ref_k1", "policy/kl_ref_k3", "time/rest_s",
        "eval/aime_2024/cons@8", "watchdog/truncation", "nonfinite/loss",
    }  # fmt: skip
    for panel in PANELS:
        for series in panel.series:
            assert any(re.fullmatch(series.key, name) for name in written), series.key


def test_of_one_dataset_the_name_is_left_out_and_of_pass_at_j_the_last_is_drawn_first():
    line = {
        "step": 0,
        "eval/x/avg@8": 0.1,
        "eval/x/avg@8_stderr": 0.01,
        "eval/x/pass@2": 0.2,
        "eval/x/pass@8": 0.3,
    }
    [panel], _ = panels_of([table(line)])
    assert [(series.label, series.band) for series in panel.series] == [
        ("avg@8", "eval/x/avg@8_stderr"), ("pass@2", ""), ("pass@8", ""),
    ]  # fmt: skip
    assert panel.hidden == ("eval/x/pass@2",)
    [panel], _ = panels_of([table(line | {"eval/y/z/avg@8": 0.1})])
    assert [series.label for series in panel.series] == ["avg@8 x", "avg@8 y/z", "pass@2 x", "pass@8 x"]


def test_what_is_zero_throughout_is_named_and_not_drawn():
    lines = [{"step": step, "update/skipped_frac": 0.0} for step in (1, 2)]
    assert panels_of([table(*lines)]) == ([], ["Skipped updates"])
    panels, zero = panels_of([table(*lines), table({"step": 1, "update/skipped_frac": 0.25})])
    assert (titles(panels), zero) == (["Skipped updates"], [])


def test_of_watchdogs_those_that_were_raised_are_drawn():
    lines = [{"step": step, "watchdog/truncation": step > 1, "watchdog/flat_groups": 0} for step in (1, 2)]
    [panel], zero = panels_of([table(*lines)])
    assert [series.label for series in panel.series] == ["truncation"]
    assert zero == []


def test_metrics_that_are_not_known_are_drawn_all_the_same():
    [panel], _ = panels_of([table({"step": 1, "mine/own": 3.0})])
    assert (panel.section, panel.title) == (OTHER, "mine/own")
