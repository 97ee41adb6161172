"""The panels of a report: one for each metric of a run."""

import re
from dataclasses import replace

from dapo_jax.report.panels import PANELS, panels_of
from dapo_jax.report.tables import EQUAL, REST, Table, comparable
from dapo_jax.trackers import read_metrics
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
    # Parts of other panels, and a metric that is 0 throughout.
    assert left == {"time/step_s", "time/eval_s", "update/skipped_frac"}
    assert zero == ["Skipped updates"]


def test_metrics_of_agents_have_panels_of_their_own():
    names = ("requests", "contexts", "tool_calls", "retries", "late")
    line = {"step": 1, "reward/parts/found": 0.5} | {f"reward/parts/agent_{name}": 1.0 for name in names}
    panels, _ = panels_of([table(line)])
    assert {panel.title: sorted(series.label for series in panel.series) for panel in panels} == {
        "Reward parts": ["found"],
        "Requests of agents": ["contexts", "requests", "tool_calls"],
        "Irregular requests of agents": ["late", "retries"],
    }


def test_patterns_name_metrics_that_runs_write():
    """A metric that was renamed would silently lose its panel. `metrics_page_test.py` compares the page with a run; `REST` is computed."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    written = {re.sub(r"@[KJ]\b", "@8", name) for name in re.findall(r"`([a-z]+/[^`]+)`", page)} | {REST}
    for panel in PANELS:
        for series in panel.series:
            assert any(re.fullmatch(series.key, name) for name in written), series.key


def test_a_single_dataset_has_no_name_and_only_the_largest_pass_at_k_is_drawn():
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


def evaluated(k, dataset="x"):
    kinds = (f"avg@{k}", f"avg@{k}_stderr", "pass@2", f"pass@{k}", f"cons@{k}")
    return table({"step": 0, **{f"eval/{dataset}/{kind}": 0.5 for kind in kinds}})


def test_runs_that_differ_in_k_are_compared_at_the_largest_common_k():
    """Both runs have pass@2 and pass@4; avg@4 and avg@8 become one line, avg@k."""
    eight = evaluated(8)
    eight.columns["eval/x/pass@4"] = [0.5]
    [panel], _ = panels_of(comparable([evaluated(4), eight]))
    assert panel.title == "Held-out accuracy, pass@4"
    assert "evaluations differ in k" in panel.note
    assert [each.key for each in panel.series if each.key not in panel.hidden] == [
        "eval/x/avg@k",
        "eval/x/pass@4",
    ]
    assert next(each.band for each in panel.series) == "eval/x/avg@k_stderr"
    assert {"eval/x/cons@4", "eval/x/cons@8", "eval/x/pass@8"} <= set(panel.hidden)


def test_runs_of_one_k_and_runs_of_different_datasets_keep_their_title():
    for tables in ([evaluated(8)], [evaluated(8), evaluated(8)], [evaluated(4, "x"), evaluated(8, "y")]):
        [panel], _ = panels_of(comparable(tables))
        assert panel.title == "Held-out accuracy"
        assert "eval/x/avg@k" not in {series.key for series in panel.series}
        assert [key for key in panel.hidden if "pass" in key] == [
            f"eval/{name}/pass@2" for name in sorted({s.key.split("/")[1] for s in panel.series})
        ]


def test_a_run_that_changed_its_k_is_drawn_at_the_largest_common_k():
    """The first evaluation has no pass@8, so pass@4 has the largest k of both."""
    first = {"eval/x/avg@4": 0.5, "eval/x/pass@2": 0.5, "eval/x/pass@4": 0.5}
    later = {"eval/x/avg@8": 0.25, "eval/x/pass@2": 0.5, "eval/x/pass@4": 0.5, "eval/x/pass@8": 0.5}
    changed = table({"step": 0, **first}, {"step": 1}, {"step": 9, **later})
    tables = comparable([changed])
    [panel], _ = panels_of(tables)
    assert tables[0].columns["eval/x/avg@k"] == [0.5, None, 0.25]
    drawn = {each.key for each in panel.series if each.key not in panel.hidden}
    assert drawn == {"eval/x/avg@k", "eval/x/pass@4"}


def test_quiet_panels_that_are_zero_are_named_and_not_drawn():
    lines = [{"step": step, "update/skipped_frac": 0.0} for step in (1, 2)]
    assert panels_of([table(*lines)]) == ([], ["Skipped updates"])
    panels, zero = panels_of([table(*lines), table({"step": 1, "update/skipped_frac": 0.25})])
    assert (titles(panels), zero) == (["Skipped updates"], [])


LEARNING = {
    "step": 1, "eval/x/avg@4": 0.0, "eval/x/reward": -1.5, "rollout/accuracy": 0.0, "reward/mean": -1.0, "rollout/mixed_frac": 0.0,
    "rollout/all_wrong_frac": 1.0, "rollout/scores_differ_frac": 0.75,
}  # fmt: skip


def test_runs_judged_by_scores_have_rewards_first_and_no_accuracies():
    judged = replace(table({**LEARNING, EQUAL: 0.25}), by_score=True)
    panels, zero = panels_of([judged, judged])
    assert titles(panels) == ["Held-out reward", "Reward", "Groups sampled"]
    assert panels[2].stacked
    assert [series.key for series in panels[2].series] == ["rollout/scores_differ_frac", EQUAL]
    assert zero == []


def test_rewards_come_first_and_accuracies_stay_for_mixed_runs():
    judged = replace(table({**LEARNING, EQUAL: 0.25}), by_score=True)
    panels, _ = panels_of([table(LEARNING), judged])
    assert titles(panels) == [
        "Held-out reward", "Reward", "Held-out accuracy", "Training accuracy", "Groups sampled", "Groups whose scores differ",
    ]  # fmt: skip
    panels, _ = panels_of([table(LEARNING)])
    assert titles(panels)[:3] == ["Held-out accuracy", "Training accuracy", "Reward"]


def test_metrics_without_a_panel_that_are_zero_are_counted():
    line = {"step": 1, "own/zero_a": 0, "own/zero_b": 0.0, "own/one": 1}
    panels, zero = panels_of([table(line)])
    assert (titles(panels), zero) == (["own/one"], ["2 other metrics"])
