"""Runs whose responses are episodes: the same whatever environments wait for, interrupted or not, by one process or several."""

import re

import numpy as np
import pytest

from dapo_jax.commands import evaluate
from dapo_jax.config import ConfigError, EnvironmentConfig, EvaluateConfig
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.rollout_log import read_rollouts
from tests import several
from tests.rollout.processes_test import assert_the_same

ENVIRONMENT = '''
import asyncio
import random

from dapo_jax.environments import Context, Step

class Sums:
    """Right is a turn whose digits add up to an even number; the sum's last digit is appended, after a while, or begins a context anew."""

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
        told = f"{digits % 10}="
        context = Context("+" + told) if turn.number == 1 and digits % 3 == 0 else None
        return Step(reward=float(digits % 2 == 0), append=told, context=context, correct=self.total % 2 == 0, metrics={"total": float(self.total)})
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
    told = {"source": f"{place}/sums.py:Sums", "max_turns": 3, "turn_tokens": 2}
    told |= {
        name.removeprefix("environment__"): value
        for name, value in changes.items()
        if name.startswith("environment__")
    }
    others = {name: value for name, value in changes.items() if not name.startswith("environment__")}
    return {
        "environment": EnvironmentConfig(**told),
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
    assert trained.metrics[1]["sync/logprob_diff_max"] < 2e-5, "of what the step's own weights sampled"
    for line in trained.metrics[1:]:
        assert 1 < line["rollout/turns"] <= 3
        assert line["rollout/response_tokens"] <= 6, (
            "three turns of two; what the environment says has no length"
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


def test_the_time_that_an_environment_takes_changes_nothing(trained, turning, run_micro, rows, same_run):
    same_run(run_micro(turning(), reward=None, eval_rows=rows), trained)


def test_the_processes_that_an_environment_is_in_change_nothing(trained, turning, run_micro, rows, same_run):
    found = run_micro(turning(environment__workers=2), reward=None, eval_rows=rows)
    same_run(found, trained)
    for step in range(1, 5):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (found.run_dir / name).read_bytes() == (trained.run_dir / name).read_bytes()


def test_an_environment_that_workers_cannot_make_is_refused_at_the_start(turning, run_micro, place):
    told = {"environment__source": f"{place}/sums.py:Sum", "environment__workers": 1}
    with pytest.raises(ConfigError, match=r"environment\.source: .*sums\.py has no 'Sum'.*Sums"):
        run_micro(turning(**told), reward=None)


def test_a_run_interrupted_after_every_step_is_the_uninterrupted_run(
    trained, turning, run_micro, rows, same_run
):
    """Groups are carried from step to step: their turns are in the checkpoint."""
    config = turning()
    assert any(line["rollout/carried_groups"] for line in trained.metrics[1:-1])
    for steps in range(1, 5):
        found = run_micro(turning(config.run_dir, steps=steps), reward=None, resume=steps > 1, eval_rows=rows)
    for line in found.metrics[1:-1]:
        for name in [name for name in line if name.startswith("eval/")]:
            del line[name]
    same_run(found, trained)


def test_credit_by_turn_trains_otherwise(trained, turning, run_micro, rows):
    by_turn = run_micro(turning(environment__credit="turn"), reward=None, eval_rows=rows)
    first, other = by_turn.metrics[1], trained.metrics[1]
    assert first["reward/mean"] == other["reward/mean"]
    assert first["update/loss"] != other["update/loss"]


def test_an_environment_that_fails_now_and_then_costs_its_episodes_alone(turning, run_micro, rows, place):
    (place / "failing.py").write_text(
        ENVIRONMENT.replace(
            "        self.total += digits\n", "        self.total += digits\n        1 / (self.total % 5)\n"
        )
    )
    result = run_micro(
        turning(environment__source=f"{place}/failing.py:Sums", steps=2), reward=None, eval_rows=rows
    )
    assert sum(line["reward/lost"] for line in result.metrics[1:]) > 0
    reasons = {
        row["reason"]
        for step in (1, 2)
        for row in read_rollouts(result.run_dir / "rollouts" / f"step_{step:06d}.jsonl")
    }
    assert any(re.search("ZeroDivisionError", reason) for reason in reasons)


def test_evaluation_by_itself_has_the_episodes_too(trained, turning, rows):
    run = turning()
    config = EvaluateConfig(
        data=run.data,
        sampling=run.sampling,
        eval=run.eval,
        environment=run.environment,
        compilation_cache=run.compilation_cache,
    )
    found = evaluate(str(trained.run_dir), config, rows=rows)
    rollouts = [rollout for groups in found.groups.values() for group in groups for rollout in group.rollouts]
    assert rollouts
    assert all(len(rollout.response.turns) == len(rollout.verdict.turn_rewards) > 0 for rollout in rollouts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment__source": "gess"}, r"environment\.source: no environment is named 'gess'"),
        ({"reward__grader": "math"}, r"environment\.source.*reward\.grader"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message, turning, run_micro, rows):
    with pytest.raises(ConfigError, match=message):
        run_micro(turning(**changes), reward=None, eval_rows=rows)


def test_a_reward_beside_an_environment_is_refused(turning, run_micro, rows):
    with pytest.raises(ConfigError, match="a reward function was given"):
        run_micro(turning(), eval_rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_train_what_one_trains(processes, on_disk, place, tmp_path):
    make = on_disk(tmp_path, "def none(sample):\n    return 0\n", "none")
    turns = [
        "reward.grader=exact", f"environment.source={place}/sums.py:Sums", "environment.max_turns=3", "environment.turn_tokens=2",
    ]  # fmt: skip
    for count in (1, processes):
        changes = {"batch__row_tokens": 40, "sampling__max_response_tokens": 14, "sampling__slots": 8}
        _, path = make(f"by_{count}", **changes)
        several.run(
            several.CHECKED + several.COMMAND, "train", path, *turns, processes=count, devices=8 // count, within_s=600
        )  # fmt: skip
    assert any(line["rollout/turns"] > 1 for line in read_metrics(tmp_path / "by_1" / "metrics.jsonl")[1:])
    assert_the_same(tmp_path / f"by_{processes}", tmp_path / "by_1")
