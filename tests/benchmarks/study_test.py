"""The ablation study: its measures, its significance tests, and its page."""

import math
import shutil

import numpy as np
import pytest

from benchmarks.study.__main__ import IN_FLIGHT_RUNS, METRICS_FILE, show
from benchmarks.study.claims import holm, judge, sign_flip_p
from benchmarks.study.curves import (
    ACCURACY,
    METRICS,
    Run,
    accuracy_at_tokens,
    final_accuracy,
    late,
    mean_accuracy,
    whole,
)
from benchmarks.study.ladder import LADDER, STUDIES

NAMES = [row.name for row in LADDER]


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
