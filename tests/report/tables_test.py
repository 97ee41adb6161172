"""Columns, axes and configurations of a report, computed by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from dapo_jax.config import BatchConfig, DynamicSamplingConfig, LossConfig, TrainConfig, load_config
from dapo_jax.config.loading import replaced
from dapo_jax.report.runs import RunFiles
from dapo_jax.report.tables import EQUAL, REST, about, configurations, table_of
from dapo_jax.trackers.run_status import RunStatus


def run(rows, config=None, name="run"):
    status = RunStatus(state="unknown", at=None)
    return RunFiles(
        name=name, folder=Path(name), config=config, rows=rows, logged=[], evaluations=[], status=status
    )


SMALL = TrainConfig(run_dir="small", batch=BatchConfig(prompts_per_step=4, group_size=8, groups_per_update=2))


def test_axes_count_up_to_the_end_of_a_step():
    """Step 1: 6 prompts x 8 responses of 10 tokens, 4 groups in updates of 2. Step 2 sampled nothing and trained on 3 groups."""
    rows = [
        {"step": 0, "time/eval_s": 5.0},
        {
            "step": 1, "rollout/prompts": 6, "rollout/response_tokens": 10.0, "rollout/trained_groups": 4, "time/step_s": 20.0,
        },
        {"step": 2, "rollout/prompts": 0, "rollout/trained_groups": 3, "time/step_s": 10.0, "time/eval_s": 2.5},
    ]  # fmt: skip
    table = table_of(run(rows, SMALL))
    assert table.axes == {
        "step": [0, 1, 2],
        "updates": [0, 2, 4],
        "sampled_tokens": [0, 480, 480],
        "clock_s": [5, 25, 37.5],
    }


def test_missing_values_are_none_and_metrics_without_numbers_are_omitted():
    rows = [{"step": 1, "a": None, "b": None}, {"step": 2, "a": 0.123456789}, {"step": 3, "a": float("inf")}]
    table = table_of(run(rows))
    assert table.columns == {"a": [None, 0.123457, None]}
    assert list(table.axes) == ["step"], "the others need a configuration"


def test_the_rest_of_a_step_includes_the_evaluation():
    line = {"step": 1, "time/sample_s": 3.0, "time/update_s": 4.0, "time/step_s": 8.0, "time/eval_s": 10.0}
    assert table_of(run([line])).columns[REST] == [11]


def test_configurations_mark_departures_and_differences():
    other = TrainConfig(run_dir="other", loss=LossConfig(clip_ratio_high=0.2))
    rows = {row["key"]: row for row in configurations([run([], SMALL), run([], other), run([], None)])}
    assert rows["loss.clip_ratio_high"] == {
        "key": "loss.clip_ratio_high",
        "default": "0.28",
        "values": ["0.28", "0.2", None],
        "departs": True,
        "differs": True,
    }
    assert rows["batch.group_size"]["values"] == ["8", "16", None]
    assert not rows["seed"]["departs"]
    assert not rows["seed"]["differs"]
    # Every run has its own.
    assert not rows["run_dir"]["departs"]
    assert rows["run_dir"]["default"] == ""


def test_runs_judged_by_scores_have_the_share_of_equal_scores():
    rows = [{"step": 0, "eval/x/reward": 1.0}, {"step": 1, "rollout/scores_differ_frac": 0.75}]
    judged = TrainConfig(run_dir="run", dynamic_sampling=DynamicSamplingConfig(metric="score"))
    table = table_of(run(rows, judged))
    assert table.by_score
    assert table.columns[EQUAL] == [None, 0.25]
    table = table_of(run(rows, SMALL))
    assert not table.by_score
    assert EQUAL not in table.columns


@pytest.mark.parametrize("name", ["dapo", "gspo", "reinforce_plus_plus"])
def test_the_algorithm_of_a_run_is_found_by_its_keys(name, tmp_path):
    (tmp_path / "c.yaml").write_text(f"run_dir: r\nseed: 7\nalgorithm: {name}\n")
    config = load_config(tmp_path / "c.yaml")
    status = RunStatus(state="finished", at=None, process={"devices": "8 x cpu"})
    ended = replace(run([], config), status=status)
    assert about(ended) == {"algorithm": name, "seed": "7", "devices": "8 x cpu"}
    changed = replace(ended, config=replaced(config, {"loss.clip_ratio_high": 0.9}))
    assert about(changed)["algorithm"] == f"{name} with loss.clip_ratio_high=0.9"
    assert about(replace(ended, config=None)) == status.process
