"""Runs whose rollouts stay in flight: the same whatever the slots, the processes, the delays and the interruptions."""

import time
from collections import Counter
from functools import partial

import numpy as np
import pytest

from dapo_jax.health.stopping import Stop, StoppedError
from dapo_jax.rollout.group_sampling import Assignment
from dapo_jax.rollout.virtual_clock import ResponseId
from dapo_jax.sampling.caches import PAGE_TOKENS
from dapo_jax.trackers.rollout_log import read_rollouts
from tests.rollout.processes_test import assert_the_same

ROUND = 2
"""A third of the six tokens that a response has at most."""


@pytest.fixture(scope="module")
def flying(micro):
    """Makes configurations with 16 responses in flight, four groups of which a step trains on two."""
    own = {"rollout__round_tokens": ROUND, "rollout__in_flight": 16, "sampling__slots": 16}
    return partial(micro, **own, optimizer__epsilon=0.1, steps=5)


@pytest.fixture(scope="module")
def flown(flying, run_micro, rows):
    """The uninterrupted run, with a checkpoint at every step."""
    return run_micro(
        flying(checkpoint__every_steps=1, checkpoint__keep=9, log__rollouts_every_steps=1), eval_rows=rows
    )


def test_steps_overlap_and_log_the_age_of_their_tokens(flown):
    lines = flown.metrics[1:]
    assert len(lines) == 5
    assert lines[0]["rollout/age_max"] == 0
    assert any(line["rollout/age_max"] > 0 for line in lines)
    for line in lines:
        assert line["rollout/trained_groups"] == 2
        assert line["rollout/newest_age_mean"] <= line["rollout/age_mean"] <= line["rollout/age_max"]
        assert (line["rollout/earlier_tokens_frac"] > 0) == (line["rollout/age_max"] > 0)
        assert line["rollout/waves"] == 0
        assert line["rollout/rounds"] >= 0
    assert sum(line["rollout/rounds"] for line in lines) > 5


def test_written_rollouts_are_trained_on_and_name_the_weights_of_their_tokens(flown):
    versions = set()
    for step in range(1, 6):
        written = read_rollouts(flown.run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(written) == 8, "two groups of four"
        assert all(row["in_loss"] for row in written)
        for row in written:
            firsts, sampled_by = zip(*row["spans"], strict=True)
            assert firsts[0] == 0
            assert max(sampled_by) < step
            versions.add(sampled_by)
    assert any(len(sampled_by) > 1 for sampled_by in versions), "some were sampled by several"


# Slow: a run each. tests/rollout/processes_test.py compares 8 and 24 slots, and tests/sampling/round_sampler_test.py few pages.
@pytest.mark.slow
@pytest.mark.parametrize(("slots", "cache_tokens"), [(8, 96), (8, 0), (32, 0)])
def test_slots_and_pages_change_nothing(slots, cache_tokens, flying, flown, run_micro, rows, monkeypatch):
    """Fewer slots than the sixteen in flight, which take turns, or more; pages for only one sequence on each device. Numbers of the host are equal, numbers of devices
    up to rounding: the width of a product decides the order of its sum."""
    cache = {"sampling__slots": slots, "sampling__cache_tokens": cache_tokens}
    monkeypatch.setitem(PAGE_TOKENS, "pages", 4)
    found = run_micro(flying(log__rollouts_every_steps=1, **cache), eval_rows=rows)
    assert_the_same(found.run_dir, flown.run_dir, steps=range(1, 6))


# Slow: another run. tests/run/grader_setup_test.py has verdicts that come late, and tests/rollout/turns_in_flight_test.py slow environments.
@pytest.mark.slow
def test_graders_that_take_their_time_change_nothing(flying, flown, run_micro, rows, even_sum, same_run):
    random = np.random.default_rng(0)

    def slowly(sample):
        time.sleep(random.choice([0.0, 0.0, 0.05]))
        return even_sum(sample)

    same_run(run_micro(flying(workers__count=0), reward=slowly, eval_rows=rows), flown)


def test_a_run_interrupted_after_every_step_in_turn_is_the_uninterrupted_run(
    flying, flown, run_micro, rows, same_run
):
    interrupted_run_is(flown, partial(flying, checkpoint__every_steps=1), run_micro, rows, same_run)


def interrupted_run_is(expected, make, run_micro, rows, same_run, **how):
    """Compares with a run that ends at each of five steps, and is evaluated there too."""
    folder = make().run_dir
    for steps in range(1, 6):
        found = run_micro(make(folder, steps=steps), resume=steps > 1, eval_rows=rows, **how)
    for line in found.metrics[1:-1]:
        for name in [name for name in line if name.startswith("eval/")]:
            del line[name]
    same_run(found, expected)


# Slow: two runs each. The quick case stops in a later step.
@pytest.mark.parametrize(
    "calls", [55, *(pytest.param(calls, marks=pytest.mark.slow) for calls in (3, 17, 29, 41, 68))]
)
def test_a_run_stopped_while_it_samples_continues_from_the_step_before(
    calls, flying, flown, run_micro, rows, even_sum, same_run
):
    stop, seen = Stop(), Counter()

    def grade(sample):
        seen["calls"] += 1
        if seen["calls"] == calls:
            stop.ask("a test")
        return even_sum(sample)

    config = flying(workers__count=0)
    with pytest.raises(StoppedError):
        run_micro(config, reward=grade, eval_rows=rows, stop=stop)
    same_run(run_micro(config, reward=even_sum, eval_rows=rows, resume=True), flown)


def test_no_prompt_is_trained_on_twice_and_none_is_lost(flying, run_micro, even_sum):
    """The reward function gets each ordinal once."""
    graded = Counter()

    def grade(sample):
        graded[sample.prompt.ordinal] += 1
        return even_sum(sample)

    result = run_micro(flying(workers__count=0, steps=3), reward=grade)
    assert set(graded.values()) == {4}
    judged = sum(line["rollout/prompts"] for line in result.metrics)
    assert 0 <= len(graded) - judged <= 4, "a graded group has its verdict, or it is due a round later"


def test_without_dynamic_sampling_every_group_is_trained_on_whatever_max_waves_is(flying, run_micro):
    """Every response is right, which has no signal."""
    config = flying(dynamic_sampling__enabled=False, dynamic_sampling__max_waves=0, steps=2)
    first, second = run_micro(config, reward=lambda sample: True).metrics
    assert (first["rollout/trained_groups"], first["rollout/all_correct_frac"]) == (2, 1.0)
    assert second["rollout/trained_groups"] == 2


# Slow: two runs of eight steps. tests/rollout/virtual_clock_test.py holds back a step by hand and bounds the ages of random clocks.
@pytest.mark.slow
def test_a_bound_on_ages_holds_steps_back(flying, run_micro):
    """Eight groups in flight for steps of two: without a bound some wait for long."""

    def oldest(bound):
        config = flying(rollout__in_flight=32, rollout__max_staleness=bound, steps=8)
        return max(line["rollout/age_max"] for line in run_micro(config).metrics)

    assert 0 < oldest(1) <= 3 < oldest(0)


def test_places_stay_full_and_a_group_that_starts_stays_together():
    """Seven responses over three samplers: 3, 2 and 2."""
    ids = [ResponseId(ordinal, index) for ordinal in range(3) for index in range(3)]
    assignment = Assignment(7, 3, {})
    assignment.give(ids[:7])
    assert [assignment.of(sampler) for sampler in range(3)] == [ids[:3], ids[3:5], ids[5:7]]
    assignment.leave([ids[1], ids[4]])
    assignment.give(ids[7:9])
    assigned = [[ids[0], ids[2], ids[7]], [ids[3], ids[8]], ids[5:7]]
    assert [assignment.of(sampler) for sampler in range(3)] == assigned


def test_responses_that_continue_are_dealt_out_by_their_length():
    """Of 70, 60, ... 10 tokens: 70, 60, 50 to samplers 0, 1, 2; back again 40, 30, 20 to 2, 1, 0; the last one to 0, which has 3 places. They hold 100, 90 and 90; by ordinal it
    would have been 180, 70 and 30."""
    ids = [ResponseId(ordinal, 0) for ordinal in range(7)]
    assignment = Assignment(7, 3, dict(zip(ids, (70, 60, 50, 40, 30, 20, 10), strict=True)))
    held = [[ids[0], ids[5], ids[6]], [ids[1], ids[4]], [ids[2], ids[3]]]
    assert [assignment.of(sampler) for sampler in range(3)] == held


@pytest.mark.parametrize("samplers", [1, 2, 3, 5])
def test_no_sampler_is_dealt_more_than_its_places(samplers):
    """Whatever is left in flight: the samplers that have one place more are the first."""
    for in_flight in range(1, 23):
        for going in range(in_flight + 1):
            lengths = {ResponseId(length, 0): length for length in range(going)}
            assignment = Assignment(in_flight, samplers, lengths)
            counts = np.array([len(assignment.of(sampler)) for sampler in range(samplers)])
            most = [in_flight // samplers + (at < in_flight % samplers) for at in range(samplers)]
            assert (counts <= most).all()
            assert counts.max() - counts.min() <= 1
