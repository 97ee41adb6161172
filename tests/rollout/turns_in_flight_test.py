"""Runs whose episodes stay in flight: the same whatever environments wait for, and the turns that waves would sample."""

from functools import partial

import numpy as np
import pytest

from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.rollout_log import read_rollouts
from tests import several
from tests.rollout.flight_test import interrupted_run_is
from tests.rollout.processes_test import FLYING, assert_the_same
from tests.run.turns_test import ENVIRONMENT, with_turns

CHANCE = ENVIRONMENT.replace("digits = sum(", "digits = random.randrange(10) + sum(").replace(
    "Sums", "Chance"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    (folder / "sums.py").write_text(ENVIRONMENT)
    (folder / "chance.py").write_text(CHANCE)
    return folder


@pytest.fixture(scope="module")
def flying(micro, place):
    """Makes configurations with 16 episodes in flight, of three turns of two tokens, sampled one token a round: a turn continues from round to round and from step to step."""

    def make(run_dir=None, **changes):
        own = {"rollout__round_tokens": 1, "rollout__in_flight": 16, "sampling__slots": 16, "steps": 5}
        return micro(run_dir, **with_turns(place, own | changes))

    return make


@pytest.fixture(scope="module")
def flown(flying, run_micro, rows):
    return run_micro(flying(), reward=None, eval_rows=rows)


def rollouts_of(result, steps):
    return [
        row for step in steps for row in read_rollouts(result.run_dir / "rollouts" / f"step_{step:06d}.jsonl")
    ]


def test_episodes_continue_from_step_to_step_and_their_environment_is_not_trained_on(flown):
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    assert any(len(row["spans"]) > 1 for row in rollouts_of(flown, range(1, 6))), "sampled by several weights"
    assert any(row.get("contexts") for row in rollouts_of(flown, range(1, 6)))
    lines = [line for line in flown.metrics[1:] if "rollout/turns" in line]
    assert len(lines) > 2, "the other steps train on groups that were ready: no verdict came in them"
    for line in lines:
        assert 1 < line["rollout/turns"] <= 3
        assert line["rollout/response_tokens"] <= 6
        assert line["reward/lost"] == 0
        assert line["reward/parts/total"] > 0
    for row in rollouts_of(flown, range(1, 6)):
        sampled = np.zeros(len(row["response_token_ids"]), bool)
        for first, stop in row["turns"]:
            sampled[first:stop] = True
        assert [value < 0 for value in row["logprobs"]] == sampled.tolist()
        assert row["score"] == sum(row["turn_rewards"])
        assert len(row["turn_rewards"]) == len(row["turns"])


# Slow: another run. tests/sampling/round_sampler_test.py compares rounds with sampling at once.
@pytest.mark.slow
def test_the_first_weights_sample_the_same_as_in_waves(flown, flying, run_micro, rows):
    """The first step trains on episodes of the first weights alone: in waves all of them, in flight the episodes that ended in time."""
    config = flying(rollout__in_flight=0, dynamic_sampling__prompts_per_wave=8, steps=1)
    waves = run_micro(config, reward=None, eval_rows=rows)
    found, expected = (
        {(row["ordinal"], row["index"]): row for row in rollouts_of(run, [1])} for run in (flown, waves)
    )
    same = found.keys() & expected.keys()
    assert len(same) >= 8
    names = ("response_token_ids", "turns", "contexts", "turn_rewards", "reward", "correct", "finish_reason")
    for one, other in ((found[key], expected[key]) for key in same):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=2e-5)


# Slow: another run. tests/run/turns_test.py has workers and other times in waves, and tests/rollout/virtual_clock_test.py late answers.
@pytest.mark.slow
def test_the_time_that_an_environment_takes_changes_no_bit(flying, flown, run_micro, rows, same_run):
    """It takes another time in each run. Rounds decide which episodes are prefilled together, so sums are rounded alike, too."""
    config = flying(workers__count=2)
    same_run(run_micro(config, reward=None, eval_rows=rows), flown)


# Slow: a run each. tests/rollout/flight_test.py has few slots; tests/sampling/turns_test.py has slots and turns.
@pytest.mark.slow
@pytest.mark.parametrize(("slots", "invariant"), [(8, False), (32, False), (64, True)])
def test_slots_change_nothing(slots, invariant, flying, flown, run_micro, rows):
    """Episodes that take turns in fewer slots than are in flight; and batch-invariant sampling, where every turn is re-prefilled."""
    changes = {"sampling__slots": slots, "sampling__batch_invariant": invariant}
    found = run_micro(flying(**changes), reward=None, eval_rows=rows)
    assert_the_same(found.run_dir, flown.run_dir, steps=range(1, 6))


# Slow: another run. The interrupted run below is evaluated after each step.
@pytest.mark.slow
def test_evaluations_between_steps_change_nothing(flying, flown, run_micro, rows):
    """An evaluation has ordinals of episodes in flight."""
    found = run_micro(flying(eval__every_steps=1), reward=None, eval_rows=rows)
    for ours, theirs in zip(found.metrics[1:], flown.metrics[1:], strict=True):
        for name, value in theirs.items():
            if not name.startswith(("time/", "speed/", "memory/", "eval/")):
                assert ours[name] == value, name


# Slow: five runs each. The test below resumes, tests/rollout/flight_test.py interrupts runs in flight, and tests/run/turns_test.py episodes.
@pytest.mark.slow
@pytest.mark.parametrize("answer_rounds", [0, 1, 3])
def test_a_run_interrupted_after_every_step_in_turn_is_the_uninterrupted_run(
    answer_rounds, flying, flown, run_micro, rows, same_run
):
    """Episodes are opened again in each process, in the middle of a turn or while their environment works."""
    make = partial(flying, rollout__answer_rounds=answer_rounds)
    whole = flown if answer_rounds == 1 else run_micro(make(), reward=None, eval_rows=rows)
    interrupted_run_is(whole, make, run_micro, rows, same_run, reward=None)


def test_a_checkpoint_has_the_answers_that_came_before_it(flying, run_micro, rows, place):
    """An environment that answers by chance. It appends the last digit of a sum, and its reward is 1 for an even one: reward and
    tokens of each turn are of the same answer."""
    make = partial(flying, environment__source=f"{place}/chance.py:Chance")
    config = make(steps=2)
    run_micro(config, reward=None, eval_rows=rows)
    found = run_micro(make(config.run_dir, steps=4), reward=None, resume=True, eval_rows=rows)
    decode, answered = CharTokenizer("0123456789+=:,?").decode, 0
    for row in rollouts_of(found, (3, 4)):
        for (_, stop), reward in zip(row["turns"], row["turn_rewards"], strict=True):
            if answer := decode(np.array(row["response_token_ids"][stop:], np.int32)).lstrip("+"):
                assert reward == (int(answer[0]) % 2 == 0)
                answered += row["spans"][0][1] < 2
    assert answered > 4, "some came before the checkpoint"


# Slow: a run each. tests/rollout/collector_test.py has an episode that is over before its first turn.
@pytest.mark.slow
@pytest.mark.parametrize("answer_rounds", [0, 1])
def test_an_episode_that_is_lost_before_its_first_turn_is_over(answer_rounds, flying, run_micro, rows, place):
    (place / "closed.py").write_text(
        ENVIRONMENT.replace(
            '        return "?"',
            '        if self.seed % 5 == 0:\n            1 / 0\n        return "?" * (99 if self.seed % 5 == 1 else 1)',
        ).replace("        self.total = 0\n", "        self.total, self.seed = 0, seed\n", 1)
    )
    own = {"environment__source": f"{place}/closed.py:Sums", "dynamic_sampling__enabled": False, "steps": 3}
    found = run_micro(flying(rollout__answer_rounds=answer_rounds, **own), reward=None, eval_rows=rows)
    for reason in ("ZeroDivisionError", "begins with 99 tokens, which leaves no room"):
        lost = [row for row in rollouts_of(found, (1, 2, 3)) if reason in row["reason"]]
        assert lost
        assert all(row["response_token_ids"] == [] == row.get("turns", []) for row in lost)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_train_what_one_trains(processes, on_disk, place, tmp_path):
    make = on_disk(tmp_path, "def none(sample):\n    return 0\n", "none")
    turns = [
        "reward.grader=exact", f"environment.source={place}/sums.py:Sums", "environment.max_turns=3", "environment.turn_tokens=2",
    ]  # fmt: skip
    flying = {**FLYING, "batch__row_tokens": 40, "sampling__max_response_tokens": 14}
    for count in (1, processes):
        _, path = make(f"by_{count}", sampling__slots=24 if count == 1 else 8, **flying)
        several.run(
            several.CHECKED + several.COMMAND, "train", path, *turns, processes=count, devices=8 // count, within_s=900
        )  # fmt: skip
    lines = read_metrics(tmp_path / "by_1" / "metrics.jsonl")[1:]
    assert any(line["rollout/turns"] > 1 for line in lines)
    assert any(line["rollout/age_max"] for line in lines)
    assert_the_same(tmp_path / f"by_{processes}", tmp_path / "by_1")
