"""Prompts that were solved several times in succession rest (`dynamic_sampling.skip_solved`)."""

import shutil
from dataclasses import replace
from functools import partial

import pytest

from dapo_jax.dapo.dynamic_sampling import ShortfallError, Solved
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.virtual_clock import ClockSizes
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.dapo.dynamic_sampling_test import make_group
from tests.rollout.collector_test import group_of, one_round, prompt_at

ROWS = 3
TWICE = Solved(visits=2, rows=ROWS, row_of=lambda ordinal: ordinal % ROWS)


def streaks_after(*visits, solved=TWICE):
    """The streaks after visits of row 1, one per epoch. A verdict is a text as in `make_group`."""
    for epoch, verdicts in enumerate(visits):
        solved = solved.after([group_of(ROWS * epoch + 1, verdicts)])
    return solved.streaks


def test_a_row_rests_for_four_epochs_after_two_solved_visits():
    """Row 1 is solved in epochs 0 and 1: it rests in epochs 2 to 5, and is sampled in epoch 6. Its count then begins at 0."""
    assert streaks_after("xx") == {1: 1}
    assert streaks_after("xx", "xx") == {1: -5}
    solved = replace(TWICE, streaks={1: -5})
    assert [solved.awake(ROWS * epoch + 1) - ROWS * epoch for epoch in range(8)] == [2] * 6 + [1] * 2
    assert [solved.awake(at) for at in (2, 3, 4)] == [2, 3, 5]
    assert solved.after([group_of(ROWS * 6 + 1, "xx")]).streaks == {1: 1}
    assert [solved.resting_frac(ROWS * epoch) for epoch in (5, 6)] == [1 / 3, 0]
    assert replace(TWICE, streaks={1: 1, 2: -5}).resting_frac(0) == 1 / 3


@pytest.mark.parametrize("between", ["x.", "..", "x?"])
def test_an_unsolved_visit_ends_a_streak(between):
    assert streaks_after("xx", between) == {}
    assert streaks_after("xx", between, "xx") == {1: 1}


def test_a_truncated_response_ends_a_streak():
    group = make_group("xx")
    cut = replace(group.rollouts[0], response=replace(group.rollouts[0].response, finish_reason="length"))
    group = replace(group, rollouts=(cut, group.rollouts[1]))
    assert replace(TWICE, streaks={0: 1}).after([group]).streaks == {}


def test_without_the_key_nothing_is_counted():
    assert Solved().after([group_of(0, "xx")]) == Solved()


def test_visits_count_in_the_order_of_ordinals_and_not_of_verdicts():
    """Ordinals 1 and 4 are the same row. The verdict of 4 arrives first. In the order of ordinals, the last visit is solved."""
    sizes = ClockSizes(in_flight=12, samples_per_prompt=2, needed=1, waves=True)
    found = Collector.after(Position(), sizes, solved=TWICE)
    found.start()
    for ordinal in (4, 1, 0, 2, 3, 5):
        found.end_group(group_of(ordinal, {1: "x.", 4: "xx"}.get(ordinal, "..")))
    assert found.finish().solved.streaks == {1: 1}


@pytest.mark.parametrize("waves", [True, False])
def test_resting_ordinals_are_used_without_being_sampled(waves):
    """Rows 0 and 1 rest. Of two groups, a wave, or the places in flight, has the ordinals 2 and 5. Ordinals 0, 1, 3 and 4 are used."""
    sizes = ClockSizes(in_flight=4, samples_per_prompt=2, needed=2, answer_rounds=0, waves=waves)
    solved = replace(TWICE, streaks={0: -9, 1: -9})
    found = Collector.after(Position(), sizes, prompt_at=prompt_at, solved=solved)
    assert [one.ordinal for one in found.start()] == [2, 2, 5, 5]
    assert found.cursor == 6
    assert list(found.clock.groups) == [2, 5]


def test_an_epoch_of_resting_rows_ends_the_run():
    solved = replace(TWICE, streaks=dict.fromkeys(range(ROWS), -9))
    with pytest.raises(ShortfallError, match=r"all 3 rows rest.*skip_solved=2 successive.*harder data"):
        solved.awake(4)
    assert solved.awake(ROWS * 9 + 1) == ROWS * 10, "row 0 is awake in epoch 10"


def test_in_flight_a_row_rests_from_the_step_after_its_verdict():
    """Every response is correct: with k = 1, rows 0 and 1 rest after the first step, in epochs 0 to 4, so the next group has ordinal 2."""
    sizes = ClockSizes(in_flight=4, samples_per_prompt=2, needed=2, answer_rounds=0)
    once = replace(TWICE, visits=1)
    first = Collector.after(Position(), sizes, prompt_at=prompt_at, solved=once, enabled=False)
    one_round(first, dict.fromkeys(range(9), 1), right=(True, True))
    collected = first.finish()
    assert collected.solved.streaks == {0: -4, 1: -4}
    position = Position(step=1, cursor=collected.cursor, in_flight=first.going_on(), streaks=collected.solved.streaks)  # fmt: skip
    again = replace(once, streaks=position.streaks)
    second = Collector.after(position, sizes, prompt_at=prompt_at, solved=again, enabled=False)
    assert [one.ordinal for one in second.start()] == [2, 2, 5, 5]


EASY = ("0+0", "1+1", "2+2")


def graded(sample, *, even_sum):
    """Three prompts are always solved."""
    return sample.prompt.text in EASY or even_sum(sample)


@pytest.fixture(scope="module")
def skipping(micro):
    """Makes configurations of six steps. Responses end at a digit, so that almost none is truncated, and the policy hardly changes."""
    return partial(
        micro, sampling__stop=list("0123456789"), dynamic_sampling__skip_solved=1, steps=6, checkpoint__every_steps=1, log__rollouts_every_steps=1,
        optimizer__learning_rate=1e-6,
    )  # fmt: skip


def visited(result, steps):
    """The prompts of the logged groups: in waves, the first four sampled ones of each step."""
    paths = [result.run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in range(1, steps + 1)]
    return [{row["prompt"] for row in read_rollouts(path)} for path in paths]


IN_FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 16}


# Slow in flight: two more runs.
@pytest.mark.parametrize("flying", [{}, pytest.param(IN_FLIGHT, marks=pytest.mark.slow)], ids=str)
def test_a_resumed_run_skips_the_same_prompts(flying, skipping, run_micro, even_sum, same_run, tmp_path):
    """Bit for bit. A wave has three of nine prompts."""
    reward = partial(graded, even_sum=even_sum)
    options = {"workers__count": 0, **flying}
    whole = run_micro(skipping(**options), reward=reward)
    resting = [line["rollout/resting_frac"] for line in whole.metrics[-6:]]
    assert resting[-1] >= 3 / 9
    if not flying:  # in flight, only groups with a signal are logged
        seen = visited(whole, 6)
        assert set.union(*seen[:3]) & set(EASY)
        assert not set.union(*seen[4:]) & set(EASY), "three prompts rest in epochs 1 to 4"
    folder = shutil.copytree(whole.run_dir, tmp_path / "run")
    for step in ("5", "6"):
        shutil.rmtree(folder / "checkpoints" / step)
    same_run(run_micro(skipping(folder, **options), reward=reward, resume=True), whole)


# Slow: two more runs. The quick tests have the same rule without a run.
@pytest.mark.slow
def test_more_visits_than_a_run_has_change_nothing(skipping, run_micro, even_sum, same_run):
    reward = partial(graded, even_sum=even_sum)
    off, never = (run_micro(skipping(dynamic_sampling__skip_solved=k, workers__count=0), reward=reward) for k in (0, 99))  # fmt: skip
    for line in never.metrics:
        assert line.pop("rollout/resting_frac", 0) == 0
    same_run(never, off)
