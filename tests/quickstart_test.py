"""The quickstart as a newcomer runs it: the shipped configurations, by the command, at full size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_jax.config import load_config
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.cluster.conftest import cluster
from tests.faults.micro import assert_the_same_run
from tests.sandbox.running import run as sandboxed

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[1] / "configs"
OF_TESTS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
"""Settings of tests/conftest.py that a user does not have. They change the rounding, and with it the course of a run."""


def run(*arguments):
    """The command in a process of its own, with all the threads that a user's would have."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
    command = [sys.executable, "-m", "dapo_jax.cli", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns_addition_from_under_half_to_nine_tenths(seed, tmp_path):
    config = CONFIGS / "quickstart.yaml"
    assert load_config(config).steps <= 300
    printed = run("train", config, f"seed={seed}", f"run_dir={tmp_path / 'run'}")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = lines[0]["eval/arithmetic/avg@8"], lines[-1]["eval/arithmetic/avg@8"]
    assert before < 0.5
    assert after >= 0.9
    assert "Usual causes" not in printed
    assert not any(value for line in lines for name, value in line.items() if name.startswith("watchdog/"))
    assert f" {before:.3f} ± " in printed
    assert f" {after:.3f} ± " in printed


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "metric", "most"),
    [
        pytest.param("turns_quickstart", "eval/guess_number/avg@4", 0.3, id="turns"),
        pytest.param("code_quickstart", "eval/one_line_programs/avg@8", 0.55, id="code"),
    ],
)
def test_another_quickstart_learns_to_nine_tenths_of_the_held_out_prompts(name, metric, most, seed, tmp_path):
    """The policy learns to search for a number, or to write all brackets of a program. `most` is the bound of the base model's accuracy."""
    if name == "code_quickstart":
        sandboxed("pass")  # skips without bubblewrap
    config = CONFIGS / f"{name}.yaml"
    assert load_config(config).steps <= 300
    run("train", config, f"seed={seed}", f"run_dir={tmp_path / 'run'}")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0][metric] < most
    assert lines[-1][metric] >= 0.9
    assert sum(line.get("reward/code/restarts", 0) for line in lines) == 0


def test_the_warm_start_of_turns_makes_a_base_model_that_knows_the_format(tmp_path):
    run("sft", CONFIGS / "turns_quickstart_sft.yaml", f"run_dir={tmp_path / 'run'}", "steps=20")
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size < 3_000_000


def test_the_warm_start_makes_a_base_model_that_is_right_a_third_to_half_of_the_time(tmp_path):
    run("sft", CONFIGS / "quickstart_sft.yaml", f"run_dir={tmp_path / 'run'}")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert 0.3 <= json.loads(lines[-1])["eval/arithmetic/avg@8"] <= 0.5
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size < 3_000_000


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("quickstart_in_flight", []),
        ("turns_quickstart", ["rollout.in_flight=128", "rollout.round_tokens=8", "rollout.weight_rounds=1"]),
    ],
)
def test_a_quickstart_with_sample_workers_is_the_run_of_one_process(name, options, tmp_path, monkeypatch):
    """Three steps, bit for bit: in one process, with two sample workers, and with three sample workers that have other slots."""
    steps, config, (one, two, three) = 3, CONFIGS / f"{name}.yaml", map(tmp_path.joinpath, "123")
    options = [*options, "sampling.batch_invariant=true", f"steps={steps}", "eval.prompts=16"]
    options += ["log.rollouts_every_steps=1", "checkpoint.every_steps=1"]
    run("train", config, *options, f"run_dir={one}")
    for variable in OF_TESTS:
        monkeypatch.delenv(variable, raising=False)
    with cluster() as nodes:
        nodes.add()
        options += [f"cluster.address={nodes.address}", "cluster.resources={CPU: 1}"]
        run("train", config, *options, "cluster.samplers=2", f"run_dir={two}")
        run("train", config, *options, "cluster.samplers=3", "sampling.slots=48", f"run_dir={three}")
    for found in (two, three):
        assert_the_same_run(found, one)
        for step in range(1, steps + 1):
            rows = [read_rollouts(each / "rollouts" / f"step_{step:06d}.jsonl") for each in (found, one)]
            assert rows[0] == rows[1] != []
