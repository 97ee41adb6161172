"""Runs whose responses are episodes: the same whatever environments wait for, interrupted or not, by one process or several."""

from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.commands import evaluate
from dapo_jax.config import ConfigError, EnvironmentConfig, EvaluateConfig
from dapo_jax.rewards.functions import RewardError
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.run.conftest import without_evaluations

ENVIRONMENT = '''
import asyncio
import random

from dapo_jax.environments import Context, Step

class Sums:
    """A turn is correct if its digits add up to an even number. After a while, the sum's last digit is appended, or begins a new context."""

    def episode(self, row, seed):
        return Episode(row, seed)

class Episode:
    def __init__(self, row, seed):
        self.total = 0

    async def start(self):
        return "?"

    async def step(self, turn):
        await asyncio.sleep(random.choice([0.0, 0.0, 0.01]))
        digits = sum(int(c) for c in turn.text if c.isdigit())
        self.total += digits
        answer = f"{digits % 10}="
        context = Context("+" + answer) if turn.number == 1 and digits % 3 == 0 else None
        return Step(reward=float(digits % 2 == 0), append=answer, context=context, correct=self.total % 2 == 0, metrics={"total": float(self.total)})
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    (folder / "sums.py").write_text(ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def turning(micro, place):
    """Makes configurations with episodes of three turns of two tokens. What is read together depends on when environments answer, so equal bits
    take batch-invariant sampling: eight slots on each of eight devices."""

    def make(run_dir=None, **changes):
        own = {"sampling__slots": 64, "sampling__batch_invariant": True}
        return micro(run_dir, **with_turns(place, own | changes))

    return make


def with_turns(place, changes):
    """The changes to a micro run whose episodes have three turns of two tokens, and these: `environment__key=value` changes one of its environment."""
    own = {"source": f"{place}/sums.py:Sums", "max_turns": 3, "turn_tokens": 2}
    own |= {
        name.removeprefix("environment__"): value
        for name, value in changes.items()
        if name.startswith("environment__")
    }
    others = {name: value for name, value in changes.items() if not name.startswith("environment__")}
    return {
        "environment": EnvironmentConfig(**own),
        "batch__row_tokens": 40,
        "sampling__max_response_tokens": 14,
        "optimizer__epsilon": 0.1,
        "log__rollouts_every_steps": 1,
        "checkpoint__every_steps": 1,
        "checkpoint__keep": 9,
        **others,
    }


@pytest.fixture(scope="module")
def trained(turning, run_micro, rows):
    return run_micro(turning(), reward=None, eval_rows=rows)


def test_episodes_are_trained_on_and_their_environment_is_not(trained):
    assert trained.metrics[1]["sync/logprob_diff_max"] < 2e-5, "the step's own weights sampled"
    for line in trained.metrics[1:]:
        assert 1 < line["rollout/turns"] <= 3
        assert line["rollout/response_tokens"] <= 6, (
            "three turns of two; the environment's text does not count"
        )
        assert line["reward/lost"] == 0
        assert line["reward/parts/total"] > 0
    for step in range(1, 5):
        for row in read_rollouts(trained.run_dir / "rollouts" / f"step_{step:06d}.jsonl"):
            ids, logprobs = row["response_token_ids"], row["logprobs"]
            sampled = np.zeros(len(ids), bool)
            for first, stop in row["turns"]:
                sampled[first:stop] = True
            assert row["turns"][0][0] == 1, "the environment begins with a token"
            assert [value < 0 for value in logprobs] == sampled.tolist()
            assert row["response_tokens"] == sampled.sum()
            assert row["score"] == sum(row["turn_rewards"])
            if row["in_loss"]:
                assert [ratio is not None for ratio in row["ratios"]] == sampled.tolist()


# Slow: a run each. The case with processes has other times, too.
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_time_and_the_processes_of_an_environment_change_nothing(
    workers, trained, turning, run_micro, rows, same_run
):
    found = run_micro(turning(workers__count=workers), reward=None, eval_rows=rows)
    same_run(found, trained)
    for step in range(1, 5):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (found.run_dir / name).read_bytes() == (trained.run_dir / name).read_bytes()


# Slow: three more runs. tests/rollout/flight_test.py interrupts a run after every step, and tests/rollout/turns_in_flight_test.py continues episodes.
@pytest.mark.slow
def test_a_run_interrupted_after_every_step_is_the_uninterrupted_run(
    trained, turning, run_micro, rows, same_run
):
    """Groups are carried from step to step: their turns are in the checkpoint."""
    config = turning()
    assert any(line["rollout/carried_groups"] for line in trained.metrics[1:-1])
    for steps in range(1, 5):
        found = run_micro(turning(config.run_dir, steps=steps), reward=None, resume=steps > 1, eval_rows=rows)
    same_run(replace(found, metrics=without_evaluations(found.metrics)), trained)


# Slow: another run. tests/training/episodes_test.py compares the gradient by turn with float64.
@pytest.mark.slow
def test_credit_by_turn_trains_otherwise(trained, turning, run_micro, rows):
    by_turn = run_micro(turning(environment__credit="turn"), reward=None, eval_rows=rows)
    first, other = by_turn.metrics[1], trained.metrics[1]
    assert first["reward/mean"] == other["reward/mean"]
    assert first["update/loss"] != other["update/loss"]


@pytest.fixture
def raising(turning, place):
    """Makes a configuration with an environment that runs `code` in each turn."""

    def make(code, **changes):
        counts = "        self.total += digits\n"
        (place / "raising.py").write_text(ENVIRONMENT.replace(counts, f"{counts}        {code}\n"))
        return turning(environment__source=f"{place}/raising.py:Sums", steps=2, **changes)

    return make


# Slow: another run. tests/environments/worker_environment_test.py loses the episode of a bad step alone.
@pytest.mark.slow
def test_an_environment_that_fails_now_and_then_costs_its_episodes_alone(raising, run_micro, rows):
    result = run_micro(raising("1 / (self.total % 5)"), reward=None, eval_rows=rows)
    assert sum(line["reward/lost"] for line in result.metrics[1:]) > 0
    logged = [read_rollouts(path) for path in (result.run_dir / "rollouts").glob("*.jsonl")]
    assert any("ZeroDivisionError" in row["reason"] for step in logged for row in step)


def test_an_environment_that_fails_in_every_turn_ends_the_run_early_with_its_file(raising, run_micro, rows):
    config = raising("raise KeyError('answr')", batch__group_size=8)
    with pytest.raises(RewardError, match=r"all \d+ episodes.*KeyError: 'answr' \(raising.*\.py, line 24\)"):
        run_micro(config, reward=None, eval_rows=rows)


def test_evaluation_by_itself_has_the_episodes_too(trained, turning, rows):
    run = turning()
    config = EvaluateConfig(
        data=run.data,
        sampling=run.sampling,
        eval=run.eval,
        environment=run.environment,
    )
    found = evaluate(str(trained.run_dir), config, rows=rows)
    rollouts = [rollout for groups in found.groups.values() for group in groups for rollout in group.rollouts]
    assert rollouts
    assert all(len(rollout.response.turns) == len(rollout.verdict.turn_rewards) > 0 for rollout in rollouts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment__source": "gess"}, r"environment\.source: no environment is named 'gess'"),
        (
            {"environment__source": f"{__file__}:Sum", "workers__count": 1},
            r"environment\.source: .*turns_test\.py has no 'Sum'",
        ),
        ({"reward__grader": "math"}, r"environment\.source.*reward\.grader"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(changes, message, turning, run_micro, rows):
    with pytest.raises(ConfigError, match=message):
        run_micro(turning(**changes), reward=None, eval_rows=rows)


def test_a_reward_beside_an_environment_is_refused(turning, run_micro, rows):
    with pytest.raises(ConfigError, match="a reward function was given"):
        run_micro(turning(), eval_rows=rows)
