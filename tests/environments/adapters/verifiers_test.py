"""Environments of verifiers 0.4: their rollouts are trained, through the server of agents."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="needs the extra http")

from dapo_jax import train
from dapo_jax.config import ConfigError, load_config
from dapo_jax.data import load_rows
from dapo_jax.environments import load_environment
from tests.environments.agent_clients import Policy, prompt_of, started
from tests.environments.playing import verdicts_of
from tests.run.conftest import assert_equal_weights, learnt

SOURCE = "verifiers:verifiers_even"
TWO = """
import verifiers.v1 as vf
from verifiers_even import EvenHarness, EvenTaskset

class TwoConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()

class Two(vf.Env[TwoConfig]):
    async def setup(self, agents):
        agents.other.trainable = {trainable}

    async def run(self, task, agents):
        await agents.other.run(task)
        await agents.solver.run(task)

__all__ = ["EvenHarness", "EvenTaskset", "Two"]
"""


@pytest.mark.parametrize(
    "load", [load_environment, lambda source: load_rows(source, "train")], ids=["episodes", "rows"]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ValueError, match=r"verifiers 0\.4.*pip install -e '\.\[verifiers\]'"):
        load("verifiers:my_environment")


@pytest.fixture
def installed(monkeypatch):
    """The package, with the environments of this folder."""
    pytest.importorskip("verifiers.v1", reason="the extra verifiers")
    monkeypatch.syspath_prepend(Path(__file__).parent)


def two_agents(folder, monkeypatch, *, trainable):
    name = f"two_{trainable}".lower()
    (folder / f"{name}.py").write_text(TWO.format(trainable=trainable))
    monkeypatch.syspath_prepend(folder)
    return load_environment(f"verifiers:{name}")


def played(environment, *texts, **how):
    """Returns the verdict on an episode with these turns, and the player."""
    row, *_ = load_rows(SOURCE, "train", options={"test_questions": 1})
    with started(environment, **how) as episodes:
        policy = Policy(episodes, prompt_of(text=row["prompt"][0]["content"], **row))
        policy.play(*texts)
        [verdict] = verdicts_of(episodes, policy.prompt)
    return verdict, policy


def test_tasks_are_rows_in_two_splits(installed):
    """There are 20 tasks, two for each of ten ranges."""
    options = {"test_questions": 6}
    test, train = (load_rows(SOURCE, split, options=options) for split in ("test", "train"))
    assert (len(test), len(train), len(load_rows(SOURCE, "train[:3]", options=options))) == (6, 14, 3)
    assert test[0]["prompt"] == [{"role": "user", "content": "00-62:"}]
    assert test[5]["prompt"] == [{"role": "user", "content": "08-70:"}]
    for wrong, message in (({}, "only 20 tasks"), ({"level": 3}, "no data.source_options.level")):
        with pytest.raises(ValueError, match=message):
            load_rows(SOURCE, "train", options=wrong)


def test_an_environment_that_cannot_be_loaded_is_refused(installed):
    with pytest.raises(ValueError, match="'no_such_tasks' not found"):
        load_environment("verifiers:no_such_tasks")
    with pytest.raises(ValueError, match="FileNotFoundError"):
        load_environment("verifiers:no_such_file.toml")


def test_a_file_has_the_options_of_verifiers(installed, tmp_path):
    """The agent ends after one of three guesses, because `max_turns` of verifiers is 1."""
    options = (
        '[env.taskset]\nid = "verifiers_even"\n[env.agent]\nmax_turns = 1\nruntime.type = "subprocess"\n'
    )
    (tmp_path / "even.toml").write_text(options)
    verdict, _ = played(load_environment(f"verifiers:{tmp_path}/even.toml"), "12")
    assert (verdict.score, verdict.parts["guesses"]) == (1.0, 1.0), verdict.reason


def test_the_reward_is_the_traces(installed):
    """Two of three guesses are even: 2/3, as 2 * 2/3 with the weight 0.5."""
    verdict, policy = played(load_environment(SOURCE), "12", "13", "14")
    assert verdict.score == pytest.approx(2 / 3), verdict.reason
    assert {"even": verdict.score, "guesses": 3.0, "agent_contexts": 1.0}.items() <= verdict.parts.items()
    assert not any(before.new_context for before in policy.befores)


def test_an_episode_that_is_cut_off_is_scored(installed):
    verdict, _ = played(load_environment(SOURCE), "12", "13", max_turns=2)
    assert (verdict.score, verdict.parts["guesses"], verdict.lost) == (0.5, 2.0, ""), verdict.reason


def test_a_rollout_that_fails_is_lost_with_its_error(installed):
    """The row is of another environment."""
    with started(load_environment(SOURCE)) as episodes:
        assert episodes.start(prompt_of(task="{}"), 0).result(30) is None
        [verdict] = verdicts_of(episodes, prompt_of(task="{}"))
    assert "replies" in verdict.reason


def test_turns_of_a_frozen_agent_stay_out_of_the_loss(installed, tmp_path, monkeypatch):
    environment = two_agents(tmp_path, monkeypatch, trainable=False)
    verdict, _ = played(environment, "11", "13", "15", "12", "14", "17")
    assert verdict.score == pytest.approx(2 / 3), verdict.reason
    assert verdict.forgotten == (0, 1, 2)
    assert (verdict.parts["agent_undelivered"], verdict.parts["agent_requests"]) == (0, 6)


def test_two_trainable_agents_are_refused_by_name(installed, tmp_path, monkeypatch):
    environment = two_agents(tmp_path, monkeypatch, trainable=True)
    with (
        started(environment, name="verifiers:two_true") as episodes,
        pytest.raises(ConfigError, match=r"2 trainable agents \(solver, other\), but needs 1"),
    ):
        episodes.check(prompt_of(), limit=100)


def run(folder, *changes):
    """Steps of eight groups of eight episodes, on a model that has seen guesses. It takes 4 s a step."""
    small = (
        "data.source_options.test_questions=2", "batch.prompts_per_step=8", "batch.group_size=8", "batch.groups_per_update=4", "batch.rows_per_microbatch=8",
        "dynamic_sampling.prompts_per_wave=8", "dynamic_sampling.metric=score", "dynamic_sampling.on_shortfall=train_fewer", "optimizer.learning_rate=4e-4", "optimizer.warmup_steps=2", "sampling.slots=64", "environment.max_turns=5",
        "eval.every_steps=0", "eval.prompts=2", "eval.samples_per_prompt=1",
    )  # fmt: skip
    keys = [f"run_dir={folder}", f"environment.source={SOURCE}", f"data.source={SOURCE}", *small, *changes]
    return train(load_config("turns_quickstart", keys))


# Slow: trains for 20 steps. The tests above have the rewards and contexts of single episodes.
@pytest.mark.slow
def test_an_environment_of_verifiers_is_learned_in_20_steps(installed, tmp_path):
    """At first, the model mostly guesses the middle of the range, which is odd. The mean reward of 320 episodes has a standard error below 0.03, so a rise by 0.2 is 5 of them."""
    import verifiers.v1 as vf

    steps = run(tmp_path / "run", "steps=20").metrics[1:]
    assert all(line["reward/lost"] == 0 for line in steps)
    assert all(line["reward/parts/agent_contexts"] == 1 for line in steps)
    assert all(line["reward/parts/even"] == pytest.approx(line["reward/mean"], abs=1e-6) for line in steps)
    assert steps[0]["sync/sampler_trainer_kl"] < 1e-6
    clients = [found for found in gc.get_objects() if isinstance(found, vf.Client)]
    assert len(clients) <= 8, "one client is shared by all episodes"
    rewards = np.array([line["reward/mean"] for line in steps])
    assert rewards[-5:].mean() > rewards[:5].mean() + 0.2, rewards


# Slow: trains twice for three steps.
@pytest.mark.slow
def test_two_runs_of_an_environment_of_verifiers_are_equal(installed, tmp_path):
    """Also with rollouts in flight, although the rollouts run concurrently."""
    runs = [run(tmp_path / f"run {number}", "steps=3", "rollout.in_flight=48", "rollout.round_tokens=4") for number in range(2)]  # fmt: skip
    assert_equal_weights(*runs)
    assert learnt(runs[0].metrics) == learnt(runs[1].metrics)
