"""The comparison of curves with TRL: its configurations, its reward, and its statistics."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.curve import RESULTS, configuration, difference, run, seconds_to, settings, show
from benchmarks.workload import exact_reward
from dapo_jax.config import to_yaml
from dapo_jax.dapo.overlong import overlong_penalty
from dapo_jax.rewards.graders import exact_grader


@pytest.mark.parametrize("text", ["=132", "7+5=12=132", "=131", "132", "", "=", "=132=", " 132\n"])
@pytest.mark.parametrize("tokens", [1, 32, 33, 40, 48])
@pytest.mark.parametrize("marker", ["=", ""])
def test_the_reward_equals_the_grader_and_the_penalty(text, tokens, marker):
    shaped = overlong_penalty(tokens, max_response_tokens=48, buffer_tokens=16)
    expected = (1.0 if exact_grader(marker)(text, "132").correct else -1.0) + shaped
    assert exact_reward(text, "132", tokens=tokens, limit=48, buffer=16, marker=marker) == expected


def test_only_dynamic_sampling_differs():
    ours, dynamic = (configuration(system, Path("runs"), 0) for system in ("ours", "dynamic"))
    assert (ours.dynamic_sampling.enabled, dynamic.dynamic_sampling.enabled) == (False, True)
    assert (ours.loss, ours.optimizer, ours.batch) == (dynamic.loss, dynamic.optimizer, dynamic.batch)


def test_the_curve_of_another_configuration_is_not_used(tmp_path):
    config = configuration("ours", tmp_path, 0)
    folder = tmp_path / "ours_0"
    folder.mkdir()
    (folder / "curve.json").write_text("[]")
    (folder / "asked.yaml").write_text(to_yaml(replace(config, run_dir=folder.name)))
    run("ours", config, tmp_path)  # does not train
    with pytest.raises(SystemExit, match="--runs"):
        run("ours", configuration("ours", tmp_path, 0, ["steps=3"]), tmp_path)


def test_the_prompts_of_trl_are_the_prompts_of_our_run():
    """A prompt such as 47+85 is five of the 15 characters, whose ids begin at 2."""
    given = settings(configuration("trl", Path("runs"), 3, ["steps=2"]))
    assert len(given["prompt_ids"]) == len(given["answers"]) == 2 * given["prompts_per_step"]
    alphabet = "0123456789+=:,?"
    for ids, answer in zip(given["prompt_ids"], given["answers"], strict=True):
        left, right = "".join(alphabet[token - 2] for token in ids).split("+")
        assert int(left) + int(right) == int(answer)


def test_the_interval_by_hand():
    """Differences 0.01 and 0.03: mean 0.02, standard error 0.01, and t is 12.706 for one degree of freedom."""
    found = difference(np.array([0.90, 0.91]), np.array([0.91, 0.94]))
    assert found == pytest.approx((0.02, 0.02 - 0.12706, 0.02 + 0.12706), abs=1e-5)


def test_a_run_that_does_not_reach_the_goal_has_no_time():
    assert np.isnan(seconds_to(np.array([[0, 0.0, 0.4], [10, 20.0, 0.8]])))


@pytest.mark.parametrize("name", [path.stem for path in sorted(RESULTS.glob("*.csv"))])
def test_the_page_has_the_tables_and_figures_of_its_curves(name, tmp_path):
    for file in ("README.md", f"{name}.csv"):
        shutil.copy(RESULTS / file, tmp_path)
    show(tmp_path, name)
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text()
    assert (RESULTS / f"{name}.png").exists()
