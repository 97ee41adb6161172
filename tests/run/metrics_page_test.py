"""docs/metrics.md explains every metric that a run logs, and none that no run logs."""

import re
from pathlib import Path

import pytest

from dapo_jax.config import EnvironmentConfig, RolloutConfig
from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.health.watchdogs import NAMES, SEEN

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
NAME = re.compile(
    r"`((?:rollout|reward|policy|update|nonfinite|sync|importance|watchdog|time|speed|memory|eval)/[^`]+)`"
)


ACCELERATORS = {"memory/device_gib", "memory/device_peak_gib"}
"""What the backend of CPUs does not say; `memory_test.py` has these."""


def explained():
    """Names in the first column of the tables of `All of them`."""
    section = PAGE.split("\n## All of them\n")[1].split("\n## ")[0]
    return [
        name
        for row in section.splitlines()
        if row.startswith("| `")
        for name in NAME.findall(row.split(" | ")[0])
    ]


def general(name):
    """A metric as the page writes it: NAME, K and J for what a configuration says."""
    name = re.sub(r"^reward/parts/.*", "reward/parts/NAME", name)
    name = re.sub(r"^eval/[^/]+/", "eval/NAME/", name)
    return re.sub(r"(avg|cons)@\d+", r"\1@K", re.sub(r"pass@\d+", "pass@J", name))


@pytest.fixture(scope="module")
def logged(micro, run_micro, rows, even_sum):
    """Everything that only some configurations log, in two runs."""
    config = micro(
        steps=1,
        loss__kl_coef=0.1,
        # So narrow that the second update has tokens above it: without any, clipped_high_prob is left out.
        loss__clip_ratio_low=1e-4,
        loss__clip_ratio_high=1e-4,
        guard__max_mismatch_kl=1.0,
        eval__every_steps=1,
    )

    def said(sample):
        """With the answer that cons@K counts."""
        return Verdict(correct=even_sum(sample), extracted=sample.response)

    graders = [(said, 1.0), ("exact", 0.5)]
    found = run_micro(config, reward=graders, eval_rows=rows)
    flying = micro(
        steps=1,
        dynamic_sampling__surplus="discard",
        rollout=RolloutConfig(in_flight=8, round_tokens=2),
        loss__correction="mask",
    )
    weighed = run_micro(flying, reward=even_sum)
    turning = micro(
        steps=1,
        dynamic_sampling__enabled=False,
        environment=EnvironmentConfig(source="guess", max_turns=2, turn_tokens=1),
    )
    of_turns = run_micro(turning, reward=None)
    lines = [*found.metrics, *weighed.metrics, *of_turns.metrics]
    return {general(name) for line in lines for name in line} - {"step"}


def test_every_metric_that_is_logged_is_explained(logged):
    assert not logged - set(explained())


def test_every_metric_that_is_explained_is_logged(logged):
    assert not set(explained()) - logged - ACCELERATORS


def test_none_is_explained_twice():
    assert len(explained()) == len(set(explained()))


def test_every_watchdog_has_its_row_and_the_metrics_it_looks_at():
    section = PAGE.split("\n## Every watchdog\n")[1].split("\n## ")[0]
    rows = [row.split(" | ") for row in section.splitlines() if row.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(NAMES)
    assert {name for row in rows for name in NAME.findall(row[1])} == set(SEEN)


def test_every_metric_in_the_text_is_one_of_the_table():
    named = {general(name) for name in NAME.findall(PAGE) if not name.endswith("/")}
    assert named <= set(explained())
