"""The ablation study: its rows are the paper's ladder, and its measures and significance tests are correct."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest

from benchmarks.report import with_table
from benchmarks.study.__main__ import IN_FLIGHT_RUNS, METRICS_FILE, show
from benchmarks.study.claims import CLAIMS, IN_FLIGHT, REMOVED, holm, judge, sign_flip_p
from benchmarks.study.curves import (
    ACCURACY,
    GROUP_SIZE,
    GROUPS_PER_UPDATE,
    METRICS,
    Run,
    accuracy_at_tokens,
    collect,
    final_accuracy,
    late,
    load,
    mean_accuracy,
    whole,
)
from benchmarks.study.ladder import LADDER, LAST, PICKED_SUMS, STUDIES, SUMS
from dapo_jax.config import load_config

NAMES = [row.name for row in LADDER]


def changed_keys(study, before, after):
    old, new = (dict(item.split("=") for item in study.overrides(name)) for name in (before, after))
    assert old.keys() == new.keys() or after in {row.name for row in study.further}
    return {key: value for key, value in new.items() if old.get(key) != value}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_first_row_has_none_of_the_techniques_and_the_last_is_the_configuration_itself(study):
    first = load_config(study.config, study.overrides("grpo"))
    assert not first.reward.overlong.enabled
    assert not first.reward.overlong.filter_truncated
    assert first.loss.clip_ratio_low == first.loss.clip_ratio_high == 0.2
    assert first.loss.aggregation == "sequence_mean"
    assert not first.dynamic_sampling.enabled
    assert load_config(study.config, study.overrides(LAST)) == load_config(study.config)


@pytest.mark.parametrize(
    ("study", "replaced"), [(SUMS, {"reward.overlong.filter_truncated": "false"}), (PICKED_SUMS, {})]
)
def test_each_row_changes_the_row_before_in_its_own_technique_alone(study, replaced):
    assert [changed_keys(study, *pair) for pair in itertools.pairwise(NAMES)] == [
        {"reward.overlong.filter_truncated": "true"},
        {"loss.clip_ratio_high": "0.28"},
        {"reward.overlong.enabled": "true", **replaced},
        {"loss.aggregation": "token_mean"},
        {"dynamic_sampling.enabled": "true"},
    ]


@pytest.mark.parametrize(
    ("study", "further", "row", "changes"),
    [
        (SUMS, "no_upper_clip", "overlong_filtering", {"loss.clip_ratio_high": "1000"}),
        (SUMS, "in_flight", LAST, {"rollout.in_flight": "128", "rollout.round_tokens": "8"}),
        (PICKED_SUMS, "no_overlong_filtering", LAST, {"reward.overlong.filter_truncated": "false"}),
        (PICKED_SUMS, "no_clip_higher", LAST, {"loss.clip_ratio_high": "0.2"}),
        (PICKED_SUMS, "no_soft_punishment", LAST, {"reward.overlong.enabled": "false"}),
        (PICKED_SUMS, "no_token_level", LAST, {"loss.aggregation": "sequence_mean"}),
        (PICKED_SUMS, "token_level", LAST, {"dynamic_sampling.enabled": "false"}),
    ],
)
def test_a_row_outside_the_ladder_differs_from_a_rung_in_one_technique(study, further, row, changes):
    assert changed_keys(study, row, further) == changes


def test_each_technique_is_removed_once_from_the_last_row():
    rows = [claim.row for claim in REMOVED if claim.primary]
    assert sorted(rows) == sorted([*(row.name for row in PICKED_SUMS.further), "token_level"])
    assert {claim.before for claim in REMOVED} == {LAST}


def test_rollouts_in_flight_are_compared_with_the_last_two_rows():
    assert {(claim.row, claim.before) for claim in IN_FLIGHT} == {
        ("in_flight", "token_level"), ("in_flight", "dynamic_sampling"),
    }  # fmt: skip


def test_tokens_of_a_run_in_flight_are_the_sampled_ones():
    run = made_run([0.0, 0.3, 0.6])
    run.values["rollout/drawn_tokens"] = np.array([np.nan, 100.0, 400.0])
    assert run.tokens.tolist() == [0, 100, 500]


def test_an_unknown_row_is_refused_by_name():
    with pytest.raises(ValueError, match="no row 'ppo'; there are grpo, overlong_filtering"):
        SUMS.overrides("ppo")


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_constants_of_the_curves_equal_the_configuration(study):
    config = load_config(study.config)
    assert (config.batch.group_size, config.batch.groups_per_update) == (GROUP_SIZE, GROUPS_PER_UPDATE)
    assert f"eval/avg@{config.eval.samples_per_prompt}" == ACCURACY


def test_every_claim_compares_a_row_with_the_one_above_it_and_each_technique_has_one_primary():
    for claim in CLAIMS:
        assert NAMES.index(claim.row) == NAMES.index(claim.before) + 1
    assert [claim.row for claim in CLAIMS if claim.primary] == NAMES[1:]


def made_run(accuracies, *, prompts=2.0, tokens=10.0, budget=math.inf):
    """Evaluated at every step; 8 trained groups are 4 updates of 2."""
    steps = len(accuracies)
    values = {metric: np.full(steps, 1.0) for metric in METRICS}
    values |= {
        ACCURACY: np.array(accuracies),
        "rollout/drawn_tokens": np.full(steps, np.nan),
        "rollout/prompts": np.array([np.nan] + [prompts] * (steps - 1)),
        "rollout/trained_groups": np.array([np.nan] + [8.0] * (steps - 1)),
        "rollout/response_tokens": np.array([np.nan] + [tokens] * (steps - 1)),
        "policy/entropy": np.arange(steps, dtype=float),
    }
    return Run(values, budget)


def test_measures_by_hand():
    run = made_run([0.0, 0.3, 0.6, 0.9], budget=480.0)
    assert run.updates.tolist() == [0, 4, 8, 12]
    assert run.tokens.tolist() == [0, 320, 640, 960]  # 2 prompts x 16 responses x 10 tokens a step
    # Means of up to three: 0, (0 + 0.3) / 2, (0 + 0.3 + 0.6) / 3, (0.3 + 0.6 + 0.9) / 3.
    assert run.accuracy == pytest.approx([0.0, 0.15, 0.3, 0.6])
    assert final_accuracy(run) == pytest.approx(0.6)
    assert mean_accuracy(run) == pytest.approx(0.6)  # (0.3 + 0.6 + 0.9) / 3
    assert accuracy_at_tokens(run) == pytest.approx(
        0.225
    )  # half way from 320 to 640 tokens: (0.15 + 0.3) / 2
    assert late("policy/entropy")(run) == 3.0  # the last of three steps
    assert whole("policy/entropy")(run) == 2.0  # (1 + 2 + 3) / 3


def test_the_sign_flip_test_counts_signs():
    assert sign_flip_p(np.ones(8)) == 2 / 256
    assert sign_flip_p(np.array([1.0, -1.0])) == 1.0
    # |sum| of (1, 2, -4): 1, of eight sums 7, 1, 3, 5 and their negatives all are at least 1.
    assert sign_flip_p(np.array([1.0, 2.0, -4.0])) == 1.0


def test_holm_multiplies_the_least_most_and_never_goes_down():
    assert holm([0.01, 0.02, 0.03]) == pytest.approx([0.03, 0.04, 0.04])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_a_row_that_is_always_better_holds_and_an_equal_row_is_undecided():
    seeds = range(8)
    level = {name: 0.1 * place for place, name in enumerate(NAMES)} | {"clip_higher": 0.1}
    runs = {
        (name, seed): made_run([level[name] + 0.001 * (seed % 2)] * 4, budget=960.0)
        for name in NAMES
        for seed in seeds
    }
    words = {verdict.claim.row: verdict.words for verdict in judge(runs, seeds) if verdict.claim.primary}
    assert words == dict.fromkeys(NAMES[1:], "holds") | {"clip_higher": "undecided"}


def test_metrics_of_run_folders_come_back_from_the_file(tmp_path):
    for seed in (0, 1):
        folder = tmp_path / f"grpo_{seed}"
        folder.mkdir()
        lines = [
            {"step": 0, "eval/chain_sums/avg@4": 0.123456},
            {"step": 1, "rollout/prompts": 32, "update/grad_norm": None},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    collect(tmp_path, ["grpo"], [0, 1], tmp_path / "metrics.csv")
    runs = load(tmp_path / "metrics.csv")
    assert set(runs) == {("grpo", 0), ("grpo", 1)}
    assert runs["grpo", 1][ACCURACY][0] == 0.12346
    assert math.isnan(runs["grpo", 1][ACCURACY][1])
    assert runs["grpo", 1]["rollout/prompts"][1] == 32


def test_tables_go_to_their_places_and_nothing_else_moves():
    page = "# A\n<!-- one -->\nold\n<!-- end -->\nB\n<!-- two -->\nold\n<!-- end -->\nC\n"
    for _ in range(2):  # the second time there is nothing left to change
        page = with_table(with_table(page, "one", "1"), "two", "2\n2")
    assert page == "# A\n<!-- one -->\n1\n<!-- end -->\nB\n<!-- two -->\n2\n2\n<!-- end -->\nC\n"
    assert with_table("# A\n", "one", "1") == "# A\n<!-- one -->\n1\n<!-- end -->\n"


@pytest.mark.parametrize(
    "study", [study for study in STUDIES.values() if (study.results / METRICS_FILE).exists()]
)
def test_the_page_has_the_tables_and_figures_that_its_metrics_make(study, tmp_path):
    for name in ("README.md", METRICS_FILE, f"{IN_FLIGHT_RUNS}/{METRICS_FILE}"):
        if (study.results / name).exists():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(study.results / name, tmp_path / name)
    show(study, tmp_path)
    assert (tmp_path / "README.md").read_text() == (study.results / "README.md").read_text()
    pictures = {path.name for path in study.results.glob("*.png")}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures


def test_runs_of_different_lengths_are_refused(tmp_path):
    head = ",".join(["row", "seed", "step", *METRICS])
    empty = "," * (len(METRICS) - 1)
    path = tmp_path / "metrics.csv"
    path.write_text(f"{head}\ngrpo,0,0,{empty}\ngrpo,1,0,{empty}\ngrpo,1,1,{empty}\n")
    with pytest.raises(ValueError, match=r"metrics\.csv: .*\[1, 2\] lines"):
        load(path)
