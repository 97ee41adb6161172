"""Runs whose episodes are agents equal the run of an environment that plays the same game."""

import os
import subprocess
import sys
import time

import jax
import pytest

pytest.importorskip("aiohttp", reason="needs the extra http")

from dapo_jax import train
from dapo_jax.config import load_config
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.faults.micro import Run
from tests.run.conftest import assert_equal_weights, learnt
from tests.several import ROOT

PLAY = "agent:tests/environments/agent_clients.py:guessing"
PROGRAM = f"command:{sys.executable} examples/agents/guess.py"
IN_FLIGHT = ("rollout.in_flight=48", "rollout.round_tokens=4")
IN_WAVES = ("sampling.batch_invariant=true", "sampling.slots=64")


def keys_of(folder, source, *changes):
    """Three steps of the shipped guessing game, of four groups of eight episodes."""
    small = (
        "steps=3", "batch.prompts_per_step=4", "batch.group_size=8", "batch.groups_per_update=4", "dynamic_sampling.prompts_per_wave=6", "dynamic_sampling.max_waves=4",
        "sampling.slots=16", "batch.rows_per_microbatch=8", "eval.every_steps=0", "log.rollouts_every_steps=1", "checkpoint.every_steps=1",
        "environment.max_turns=5", "eval.prompts=2", "eval.samples_per_prompt=1",
    )  # fmt: skip
    return [f"run_dir={folder}", f"environment.source={source}", *small, *changes]


def run(folder, source, *changes, resume=False):
    return train(load_config("turns_quickstart", keys_of(folder, source, *changes)), resume=resume)


def assert_same(found, expected):
    """All values but the clock's and the agents' own are equal."""
    assert_equal_weights(found, expected)
    lines, others = (learnt(read_metrics(run.run_dir / "metrics.jsonl")) for run in (found, expected))
    for line, other in zip(lines, others, strict=True):
        own = {name for name in line if "/agent_" in name}
        assert {name: value for name, value in line.items() if name not in own} == other
    for step in range(1, 4):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert read_rollouts(found.run_dir / name) == read_rollouts(expected.run_dir / name)


@pytest.fixture(scope="module")
def guessed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("guess") / "run", "guess", *IN_FLIGHT)


# Slow, as all tests here: they compile a model of half a million parameters. tests/environments/agents_test.py has the same contexts and rewards without one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "changes", "delay"),
    [(PLAY, (), 0), (PROGRAM, (), 0), (PLAY, ("workers.count=2",), 0.05)],
    ids=["function", "command", "workers and delays"],
)
def test_an_agent_that_plays_a_game_is_trained_as_the_games_environment(
    source, changes, delay, guessed, tmp_path, monkeypatch
):
    monkeypatch.setenv("DELAY", str(delay))
    found = run(tmp_path / "run", source, *IN_FLIGHT, *changes)
    assert_same(found, guessed)
    cut = [line["rollout/truncated_frac"] for line in found.metrics[1:]]
    assert any(cut), "some episodes end at their last turn"
    assert all(line["reward/lost"] == 0 for line in found.metrics[1:])
    assert all(line["reward/parts/agent_contexts"] == 1 for line in found.metrics[1:])


@pytest.mark.slow
def test_in_waves_an_agent_is_trained_as_the_games_environment(tmp_path):
    expected = run(tmp_path / "guess", "guess", *IN_WAVES)
    assert_same(run(tmp_path / "agent", PLAY, *IN_WAVES), expected)


@pytest.mark.slow
def test_only_unfinished_episodes_of_an_agent_that_does_not_repeat_are_lost_after_an_interruption(tmp_path):
    """Their later requests have a random word."""
    play = "agent:tests/environments/agent_clients.py:guessing_at_random"
    first = run(tmp_path / "run", play, *IN_FLIGHT, "steps=1")
    assert first.metrics[-1]["reward/lost"] == 0
    resumed = run(tmp_path / "run", play, *IN_FLIGHT, "steps=3", resume=True)
    rows = [
        row for step in (2, 3) for row in read_rollouts(resumed.run_dir / f"rollouts/step_{step:06d}.jsonl")
    ]
    lost = [row for row in rows if "before turn" in row["reason"]]
    assert lost
    assert all(row["spans"][0][1] == 0 for row in lost), "they began before the interruption"
    assert sum(line["reward/lost"] for line in resumed.metrics[1:]) > 0


@pytest.mark.slow
def test_a_run_of_agents_that_is_interrupted_after_each_step_is_the_uninterrupted_run(guessed, tmp_path):
    for steps in (1, 2, 3):
        found = run(tmp_path / "run", PLAY, *IN_FLIGHT, f"steps={steps}", resume=steps > 1)
    assert_equal_weights(found, guessed)


@pytest.mark.slow
@pytest.mark.parametrize("source", [PLAY, PROGRAM], ids=["function", "command"])
def test_a_run_of_agents_that_is_killed_in_the_middle_of_a_step_is_the_uninterrupted_run(
    source, guessed, tmp_path, monkeypatch
):
    """SIGKILL ends it after the first checkpoint, while agents wait before their next requests."""
    monkeypatch.setenv("DELAY", "1")
    killed = Run(tmp_path)
    words = ["train", "turns_quickstart", *keys_of(killed.run_dir, source, *IN_FLIGHT)]
    # As many devices as in this process: the sums of gradients depend on their number.
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(jax.device_count()), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "dapo_jax.cli", *words], cwd=ROOT, env=environment)
    try:
        killed.wait_for(process, lambda: killed.steps() == [1], within_s=300)
        time.sleep(0.3)
    finally:
        process.kill()
        process.wait()
    assert killed.steps() == [1], "the second step has begun, and has not ended"
    monkeypatch.setenv("DELAY", "0")
    assert_same(run(killed.run_dir, source, *IN_FLIGHT, resume=True), guessed)
