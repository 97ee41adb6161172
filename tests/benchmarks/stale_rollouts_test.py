"""The comparison of ways to train on old tokens: its configurations, and the page made from its metrics."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.stale_rollouts import METRICS, METRICS_FILE, RESULTS, WAYS, configuration, load, show
from dapo_jax.config import ConfigError, load_config

WAY = {way.name: way for way in WAYS}


def test_the_way_that_no_configuration_can_ask_for_is_the_default_without_weights():
    default, none = (configuration(WAY[name], Path("runs"), 0) for name in ("truncate", "none"))
    assert (default.correction.kind, none.correction.kind) == ("truncate", "none")
    assert none.loss == default.loss
    assert none.rollout == default.rollout
    with pytest.raises(ConfigError, match="collapses"):
        load_config("configs/study/dapo.yaml", [*WAY["none"].changes, "loss.correction=none"])


def test_the_other_ways_are_configurations():
    waves, bypass = (configuration(WAY[name], Path("runs"), 0) for name in ("waves", "bypass"))
    assert waves.rollout.in_flight == 0
    assert bypass.loss.old_logprobs == "sampler"
    assert bypass.rollout.in_flight == 5 * bypass.batch.prompts_per_step * bypass.batch.group_size


def test_the_page_has_the_table_and_the_figure_that_its_metrics_make(tmp_path):
    for name in ("README.md", METRICS_FILE):
        shutil.copy(RESULTS / name, tmp_path)
    show(tmp_path)
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text()
    assert (tmp_path / "stale_rollouts.png").stat().st_size > 10_000
    runs = load(RESULTS / METRICS_FILE)
    assert {name for name, _ in runs} == set(WAY)


@pytest.mark.parametrize("metric", METRICS)
def test_every_kept_metric_was_logged(metric):
    assert np.isfinite(load(RESULTS / METRICS_FILE)["truncate", 0][metric]).any()
