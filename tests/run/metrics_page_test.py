"""docs/metrics.md explains exactly the metrics that runs log."""

import re
from pathlib import Path

import pytest

from dapo_jax.config import DynamicSamplingConfig, EnvironmentConfig, RolloutConfig, TeacherConfig
from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.health.watchdogs import NAMES, SEEN

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
NAME = re.compile(
    r"`((?:rollout|reward|policy|teacher|update|nonfinite|sync|routing|importance|center|watchdog|time|speed|memory|eval)/[^`]+)`"
)


ACCELERATORS = {"memory/device_gib", "memory/device_peak_gib"}
"""Not reported by CPUs; `memory_metrics_test.py` covers them."""

JUDGES = {"reward/judge/calls", "reward/judge/cache_hits", "reward/judge/tokens"}
"""Only with a judge; `judge_test.py` covers them."""

CODE = {"reward/code/passed", "reward/code/cache_hits", "reward/code/restarts"}
"""Only with the grader `code`; `tests/faults/code_kill_test.py` covers them."""


def rows_of(title):
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [row.split(" | ") for row in section.splitlines() if row.startswith("| `")]


def explained():
    """Names in the first column of the tables of `All of them`."""
    return [name for row in rows_of("All of them") for name in NAME.findall(row[0])]


def general(name):
    """A metric as the page writes it: NAME, K and J in place of values of a configuration."""
    name = re.sub(r"^(reward/parts|update/ratio|update/step_rms)/.*", r"\1/NAME", name)
    name = re.sub(r"^eval/[^/]+/", "eval/NAME/", name)
    return re.sub(r"(avg|cons)@\d+", r"\1@K", re.sub(r"pass@\d+", "pass@J", name))


@pytest.fixture(scope="module")
def logged(micro, run_micro, rows, even_sum, model, moe_model):
    """The names of all metrics, from two runs of a step."""

    def extracting(sample):
        """A verdict with an answer, for cons@K."""
        return Verdict(correct=even_sum(sample), extracted=sample.response)

    # The clip is so narrow that the second update has tokens above it: without any, clipped_high_prob is left out.
    clipped = {"loss__clip_ratio_low": 1e-4, "loss__clip_ratio_high": 1e-4, "loss__kl_coef": 0.1}
    # Weights in eight bits differ enough for the metrics of the mismatch's signs.
    rounded = {
        "loss__correction": "truncate",
        "model__compute_dtype": "bfloat16",
        "sampling__weight_dtype": "int8",
    }
    taught = micro(
        steps=1,
        model__source=moe_model,
        teacher=TeacherConfig(source=model, rewards=True),
        dynamic_sampling__skip_solved=2,
        guard__max_mismatch_kl=1.0,
        loss__drop_off_policy=0.5,
        eval__every_steps=1,
        **clipped,
        **rounded,
    )
    in_flight = micro(
        steps=1,
        environment=EnvironmentConfig(source="guess", max_turns=2, turn_tokens=1),
        dynamic_sampling=DynamicSamplingConfig(enabled=False, surplus="discard"),
        rollout=RolloutConfig(in_flight=8, round_tokens=2),
        loss__correction="mask",
        loss__select="high_entropy",
        loss__center=3,
    )
    results = [
        run_micro(taught, reward=[(extracting, 1.0), ("exact", 0.5)], eval_rows=rows),
        run_micro(in_flight, reward=None),
    ]
    return {general(name) for result in results for line in result.metrics for name in line} - {"step"}


# Slow: two runs with programs of their own. The test below has the metrics of a plain run.
@pytest.mark.slow
def test_each_logged_metric_is_explained_once(logged):
    assert sorted(explained()) == sorted(logged | ACCELERATORS | JUDGES | CODE)


def test_the_metrics_of_a_plain_run_are_explained(finished):
    names = {general(name) for line in finished.metrics for name in line} - {"step"}
    assert names <= set(explained())
    assert len(names) > 50


def test_every_watchdog_has_its_row_with_its_metrics():
    rows = rows_of("Every watchdog")
    assert [row[0].strip("| `") for row in rows] == list(NAMES)
    assert {name for row in rows for name in NAME.findall(row[1])} == set(SEEN)


def test_every_metric_in_the_text_is_one_of_the_table():
    named = {general(name) for name in NAME.findall(PAGE) if not name.endswith("/")}
    assert named <= set(explained())
