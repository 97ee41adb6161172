"""The expected step in waves and in flight: by hand, by what must rise and fall, and beside the sampler's own loops on a scripted engine."""

from dataclasses import replace
from itertools import islice

import jax
import numpy as np
import pytest

from dapo_jax.config import DynamicSamplingConfig, RolloutConfig, load_config
from dapo_jax.dapo.rollouts import Group, Prompt, Rollout, Verdict
from dapo_jax.plan.expected_step import Samplers, by_clock, expected_step, in_waves, suggested
from dapo_jax.plan.lengths import Responses, log_normal
from dapo_jax.plan.sampling_time import IN_STEPS, SamplingTime
from dapo_jax.plan.workload import Assumptions, workload_of
from dapo_jax.rollout.collector import FlightCollector
from dapo_jax.rollout.group_sampling import Places
from dapo_jax.rollout.virtual_clock import ClockSizes
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.pages import PageSizes, slot_pages
from dapo_jax.sampling.rounds import Going, RoundSampler
from dapo_jax.testing import ScriptedEngine

EOS, PROMPT, LIMIT = 1, 3, 24
READING = SamplingTime(decode=IN_STEPS.decode, read=lambda tokens, pairs, sequences: 100 * tokens + sequences)
"""A decode step takes 1, and reading 100 a token and 1 a sequence."""


def responses_of(rows, informative=1.0):
    """The lengths of the responses to prompts 0, 1, ..., and from there on those of the last one."""
    table = np.array(rows)

    def draw(chunk, groups):
        return table[np.minimum(np.arange(groups) + chunk * groups, len(table) - 1)]

    return Responses(draw, informative=informative)


def samplers(count=1, places=2, **how):
    return Samplers(count=count, places=places, prompt_tokens=float(PROMPT), **{"time": IN_STEPS, **how})


def clocked(
    responses, held, steps, *, in_flight, round_tokens, needed=1, samples=2, verdict_rounds=0, bound=0
):
    sizes = ClockSizes(
        in_flight=in_flight, samples_per_prompt=samples, needed=needed, verdict_rounds=verdict_rounds, max_age_steps=bound
    )  # fmt: skip
    return list(islice(by_clock(responses, held, sizes, round_tokens=round_tokens), steps))


def waved(responses, held, steps, *, wave, needed=1, **dynamic):
    how = DynamicSamplingConfig(**dynamic)
    return list(islice(in_waves(responses, held, needed=needed, prompts_per_wave=wave, dynamic=how), steps))


@pytest.mark.parametrize("wave", [8, 12])
def test_of_equal_lengths_both_ways_are_the_same_but_for_the_surplus(wave):
    """Half of the groups are informative and 4 are needed: 8 prompts of two responses of 6 tokens, 16 responses in the 8 slots of two samplers, are twice 6 steps in which all
    draw. A wave of 12 has three times 6, of 6 informative groups two too many."""
    responses, held = responses_of([[6, 6]], informative=0.5), samplers(count=2, places=4)
    for step in waved(responses, held, 3, needed=4, wave=wave):
        assert step.decode_steps == step.seconds == 6 * wave / 4
        assert step.live_s == step.drawn_tokens == wave * 12
        assert step.thrown_away_tokens == (wave - 8) // 2 * 12
        assert step.ages == [0] * 4
    for step in clocked(responses, held, 3, in_flight=8, round_tokens=6, needed=4):
        assert step.decode_steps == step.seconds == 12
        assert step.live_s == step.drawn_tokens == 96
        assert (step.thrown_away_tokens, step.kept_tokens) == (0, 0)
        assert step.ages == [0] * 4


UNEQUAL = [[1, 4], [2, 2], [3, 1], [2, 2]]


def test_waves_of_one_prompt_by_hand():
    """Two slots: 4 steps for responses of 1 and 4 tokens, 2 for 2 and 2, 3 for 3 and 1."""
    found = waved(responses_of(UNEQUAL), samplers(), 3, wave=1)
    assert [step.decode_steps for step in found] == [4, 2, 3]
    assert [step.live_s for step in found] == [5, 4, 4]
    assert [step.drawn_tokens for step in found] == [5, 4, 4]


def test_two_in_flight_by_hand():
    """Two slots, rounds of 2 tokens. Responses 00 (1 token) and 01 (4) begin; 00 ends in the first round, which takes 2 steps. In the second 01 ends, and with it group 0 and the step; so does
    10 (2). In the second step 11 and 20 begin with new weights, and nothing is read again; 11 ends: group 1, whose first token is a step old. 20 has drawn 2 of 3; the third step reads it
    again with its prompt, and it goes on for 1 beside 21 (1): group 2, in one step of the engine."""
    found = clocked(responses_of(UNEQUAL), samplers(time=READING), 3, in_flight=2, round_tokens=2)
    assert [step.decode_steps for step in found] == [4, 2, 1]
    assert [step.live_s for step in found] == [7, 4, 2]
    assert [step.rounds for step in found] == [2, 1, 1]
    assert [step.ages for step in found] == [[0], [1], [1]]
    assert [step.kept_tokens for step in found] == [2, 2, 0]
    assert [step.read_again_tokens for step in found] == [0, 0, PROMPT + 2]
    # Prompts 0 and 1, of 3 tokens each; in the second step 1 again for its other response, and 2; in the third 2 for its other response.
    assert [step.read_s for step in found] == [602, 602, 501 + 301]
    assert [step.seconds for step in found] == [4 + 602, 2 + 602, 1 + 802]


def test_where_there_are_more_in_flight_than_slots_they_take_turns():
    """Four responses of 4 tokens in two slots: a round of 2 tokens is twice 2 steps."""
    [step] = clocked(responses_of([[4, 4, 4, 4]]), samplers(), 1, in_flight=4, round_tokens=2, samples=4)
    assert (step.decode_steps, step.rounds, step.live_s) == (8, 2, 16)


def test_what_the_pages_do_not_hold_is_read_again_in_each_round():
    """After the first round two responses hold 3 + 2 tokens each, after the second 3 + 4: of 8 tokens of pages 2 and 6 are missing."""
    held = samplers(cache_tokens=8.0, time=READING)
    [step] = clocked(responses_of([[4, 4]]), held, 1, in_flight=2, round_tokens=2)
    assert step.read_again_tokens == 2 + 6
    assert step.seconds == pytest.approx(4 + 301 + 200 + 2 / 5 + 600 + 6 / 7)


PAIRS = SamplingTime(decode=IN_STEPS.decode, read=lambda tokens, pairs, sequences: pairs)


@pytest.mark.parametrize(("time", "read"), [(READING, 301 + 2 * (501 + 701)), (PAIRS, 6 + 2 * (15 + 28))])
@pytest.mark.parametrize("round_tokens", [1, 2, 3, 6])
def test_between_turns_an_episode_is_read_again(time, read, round_tokens):
    """Two episodes of 6 tokens, each in three turns of 2, behind a prompt of 3: read again with 3 + 2 and 3 + 4 tokens, in whichever round a turn ends. Pairs are 3 x 4 / 2 of the
    prompt, which is read once, 5 x 6 / 2 and 7 x 8 / 2."""
    responses, held = responses_of([[6, 6]]), samplers(time=time, readings=2.0)
    [wave] = waved(responses, held, 1, wave=1)
    [flight] = clocked(responses, held, 1, in_flight=2, round_tokens=round_tokens)
    for step in (wave, flight):
        assert step.read_again_tokens == 2 * (5 + 7)
        assert step.read_s == read
        assert step.seconds == 6 + read


def test_every_sampler_reads_its_own_episodes_again():
    """Prompts 0 and 2 are those of the first sampler, whose four episodes of two turns have 3 + 2, 3 + 2, 3 + 1 and 3 + 1 tokens between these; the other has two of 3 + 3."""
    responses = responses_of([[4, 4], [6, 6], [2, 2]])
    [step] = waved(responses, samplers(count=2, time=READING, readings=1.0), 1, wave=3, needed=3)
    assert step.read_again_tokens == 2 * 5 + 2 * 4 + 2 * 6
    # Of the prompts two and one are read: 602 and 301. The first sampler decodes 4 steps and 2, and is the last.
    first, second = 602 + 2 * 501 + 2 * 401, 301 + 2 * 601
    assert step.read_s == (first + second) / 2
    assert step.seconds == 6 + first


def test_the_waves_of_a_step_follow_each_other_and_carried_groups_are_older():
    """Every second group is informative. Of waves of one prompt a step that needs a group has two, and nothing is left. With surplus groups carried, two at a time of
    which all are informative leave the second for the next step, which samples nothing."""
    responses = responses_of([[2, 2]], informative=0.5)
    found = waved(responses, samplers(), 3, wave=1)
    assert [(step.rounds, step.decode_steps) for step in found] == [(2, 4)] * 3
    [first, second] = waved(responses_of([[2, 2]]), samplers(), 2, wave=2, surplus="carry")
    assert (first.drawn_tokens, first.thrown_away_tokens, first.kept_tokens, first.ages) == (8, 0, 4, [0])
    assert (second.drawn_tokens, second.ages, second.rounds) == (0, [1], 0)


def drawn(std=12.0, mean=10.0, samples=4, informative=0.5):
    return Responses(log_normal(mean=mean, std=std, limit=LIMIT, samples=samples), informative=informative)


def both(responses, held, *, in_flight=32, round_tokens=4, needed=16, wave=48, bound=0, verdict_rounds=1):
    """Sums over eight steps, after eight: (waves, in flight)."""
    waves = waved(responses, held, 16, wave=wave, needed=needed)[8:]
    flight = clocked(
        responses, held, 16, in_flight=in_flight, round_tokens=round_tokens, needed=needed, samples=4, bound=bound,
        verdict_rounds=verdict_rounds,
    )[8:]  # fmt: skip
    return waves, flight


def total(steps, name):
    return sum(getattr(step, name) for step in steps)


def idle(steps, held):
    return 1 - total(steps, "live_s") / (held.count * held.places * total(steps, "seconds"))


def test_the_more_lengths_differ_the_longer_slots_idle_in_waves():
    held = samplers(count=4, places=8)
    found = [idle(both(drawn(std=std), held)[0], held) for std in (0.0, 3.0, 6.0, 12.0)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] > 0.1


def test_shorter_rounds_leave_slots_idle_for_less():
    held = samplers(count=4, places=8)
    found = [idle(both(drawn(), held, round_tokens=tokens)[1], held) for tokens in (1, 4, 8, 16)]
    assert found == sorted(found)
    assert found[0] == 0


def test_in_flight_no_more_is_drawn_than_needed_and_in_waves_the_surplus_too():
    """32 groups of 4 responses of 10 tokens are needed for 16 informative ones; a wave has 48."""
    waves, flight = both(drawn(), samplers(count=4, places=8))
    assert total(flight, "drawn_tokens") == pytest.approx(8 * 32 * 4 * 10, rel=0.05)
    assert total(waves, "drawn_tokens") == pytest.approx(8 * 48 * 4 * 10, rel=0.05)
    assert total(waves, "thrown_away_tokens") == pytest.approx(8 * 8 * 4 * 10, rel=0.1)
    assert total(flight, "thrown_away_tokens") == 0


def test_the_more_is_in_flight_the_older_it_gets_unless_ages_are_bound():
    held = samplers(count=4, places=64)

    def oldest(in_flight, bound=0):
        _, flight = both(drawn(), held, in_flight=in_flight, bound=bound)
        ages = [age for step in flight for age in step.ages]
        return np.mean(ages), max(ages)

    means, most = zip(*map(oldest, (32, 128, 256)), strict=True)
    assert list(means) == sorted(means)
    assert most[-1] > oldest(256, bound=1)[1] <= 3


def test_twice_the_samplers_take_half_as_long_in_flight():
    few, many = (samplers(count=count, places=8) for count in (2, 4))
    slow, fast = (
        both(drawn(), held, in_flight=8 * held.count, needed=64, wave=192)[1] for held in (few, many)
    )
    assert total(slow, "seconds") == pytest.approx(2 * total(fast, "seconds"), rel=0.05)


# Beside the real loops: `DecodeLoop` and `RoundSampler` on an engine that follows a script.


def script_of(responses):
    return lambda ordinal, index: [7] * (int(responses.lengths([ordinal])[0, index]) - 1) + [EOS]


def engine_of(responses, *, slots, holders=0, steps_per_call=1):
    capacity = PROMPT + LIMIT
    pages = slot_pages(slots, capacity)
    if holders > slots:
        pages = PageSizes(
            holders=holders, capacity=capacity, page_tokens=1, pools=1, pool_pages=holders * capacity
        )
    return ScriptedEngine(
        script_of(responses), slots=slots, capacity=capacity, steps_per_call=steps_per_call, stop_ids=[EOS], page_sizes=pages,
    )  # fmt: skip


def prompt_at(ordinal):
    return Prompt(ordinal=ordinal, tokens=np.full(PROMPT, 9, np.int32), text="", answer="")


@pytest.mark.parametrize(("count", "slots"), [(1, 5), (3, 8), (2, 1)])
def test_a_wave_is_that_of_the_samplers_own_loop(count, slots):
    """Calls of one token, so that a slot is refilled as soon as it is free. The numbers of engine steps, and of slots that draw in them, are the same."""
    responses, wave = drawn(informative=1.0), 24
    [step] = waved(responses, samplers(count=count, places=slots), 1, wave=wave, needed=wave)
    engines = [engine_of(responses, slots=slots) for _ in range(count)]
    for sampler, engine in enumerate(engines):
        mine = [prompt_at(ordinal) for ordinal in range(wave) if ordinal % count == sampler]
        sampled = Sampler(engine, prefill_prompts=2, refill_frac=0.0).sample(
            {}, lambda n, mine=mine: [mine.pop(0) for _ in range(min(n, len(mine)))],
            key=jax.random.key(0), decoding=decoding(), samples_per_prompt=4, max_response_tokens=LIMIT,
        )  # fmt: skip
        assert len(list(sampled)) == len(range(sampler, wave, count))
    assert step.decode_steps == max(len(engine.live_slots) for engine in engines)
    assert step.live_s == sum(sum(engine.live_slots) for engine in engines) == step.drawn_tokens


class Flown:
    """The steps of a run with rollouts in flight, by the collector, places and samplers of a run."""

    def __init__(self, responses, sizes, *, count, slots, round_tokens):
        self.responses, self.sizes, self.count, self.round_tokens = responses, sizes, count, round_tokens
        self.engines = [
            engine_of(responses, slots=slots, holders=-(-sizes.in_flight // count), steps_per_call=3)
            for _ in range(count)
        ]
        self.in_flight, self.ready = None, []

    def step(self):
        collector = FlightCollector.of(
            self.sizes, self.in_flight, self.ready, max_groups=10**6, metric="correct", enabled=True
        )
        going = {one: len(collector.responses[one].tokens) for one in collector.clock.in_flight()}
        places, steps = Places(self.sizes.in_flight, self.count, going), 0
        before = [len(engine.live_slots) for engine in self.engines]
        rounds = [
            RoundSampler(engine, {}, key=jax.random.key(0), decoding=decoding(), max_response_tokens=LIMIT)
            for engine in self.engines
        ]
        while collector.goes_on:
            places.give(collector.start())
            found, took = {}, []
            for sampler, (engine, drawing) in enumerate(zip(self.engines, rounds, strict=True)):
                mine, first = places.of(sampler), len(engine.live_slots)
                asked = [
                    Going(prompt=prompt_at(one.ordinal), index=one.index, tokens=collector.responses[one].tokens)
                    for one in mine
                ]  # fmt: skip
                found |= dict(zip(mine, drawing.draw(asked, self.round_tokens), strict=True))
                took.append(len(engine.live_slots) - first)
            steps += max(took)
            collector.take(found)
            due = collector.end_round().due
            places.leave(one for one, part in found.items() if part.finish_reason is not None)
            collector.judge([self.graded(collector, ordinal) for ordinal in due])
        version, live = collector.clock.version, sum(
            sum(engine.live_slots[first:]) for engine, first in zip(self.engines, before, strict=True)
        )  # fmt: skip
        collected = collector.finish()
        self.in_flight, self.ready = collected.in_flight, collected.carry
        waiting = sum(len(one.response.tokens) for group in self.ready for one in group.rollouts)
        return {
            "decode_steps": steps,
            "live_s": live,
            "drawn_tokens": collected.drawn_tokens,
            "rounds": collected.rounds,
            "ages": [version - group.oldest for group in collected.groups],
            "kept_tokens": waiting
            + sum(len(response.tokens) for response in self.in_flight.responses.values()),
        }

    def graded(self, collector, ordinal):
        mixed = self.responses.informative(ordinal)
        return Group(
            prompt=prompt_at(ordinal),
            rollouts=tuple(
                Rollout(response=response, text="", verdict=Verdict(correct=mixed and index > 0), reward=0.0)
                for index, response in enumerate(collector.responses_to(ordinal))
            ),
        )


@pytest.mark.parametrize(
    ("in_flight", "count", "slots", "bound"),
    [(16, 1, 16, 0), (32, 3, 11, 0), (24, 2, 12, 1), (24, 2, 6, 0), (32, 2, 6, 0), (8, 2, 16, 0)],
)
def test_steps_in_flight_are_those_of_the_runs_own_loop(in_flight, count, slots, bound):
    """With a slot for each, with slots for half of them or fewer, and with slots left over: engine steps of the longest sampler, slots that draw, tokens, ages and what a checkpoint
    would hold, over ten steps."""
    responses = drawn(informative=0.5)
    sizes = ClockSizes(
        in_flight=in_flight, samples_per_prompt=4, needed=4, verdict_rounds=1, max_age_steps=bound
    )
    flown = Flown(responses, sizes, count=count, slots=slots, round_tokens=5)
    held = samplers(count=count, places=slots)
    for step in islice(by_clock(responses, held, sizes, round_tokens=5), 10):
        real = flown.step()
        # Where they take turns the last in line may be a longer one.
        turns = in_flight > slots * count
        assert step.decode_steps == pytest.approx(real.pop("decode_steps"), rel=0.05 if turns else 0)
        assert {name: getattr(step, name) for name in real} == real


# What is told of a configuration.

SMALL = [
    "rollout.round_tokens=8", "sampling.slots=64", "batch.prompts_per_step=64", "batch.group_size=16", "dynamic_sampling.surplus=discard",
    "dynamic_sampling.prompts_per_wave=192",
]  # fmt: skip


def told(*changes, room=64.0, **how):
    config = load_config("quickstart", [*SMALL, *changes])
    assumed = Assumptions(response_tokens=16, response_tokens_std=12, prompt_tokens=8)
    work = workload_of(config, assumed)
    return expected_step(config, work, slot_pages(64, 56), samplers=2, room=room, **how)


def test_without_rollouts_in_flight_as_many_as_there_are_slots_are_supposed():
    found = told()
    assert (found.in_flight, found.configured, found.round_tokens) == (128, False, 8)
    assert found.waves.seconds is found.flight.step_s is None, "nobody knows without a chip"
    assert any("the configuration has no rollout.in_flight" in line for line in found.assumed)
    fine = told("rollout.round_tokens=2")
    assert fine.round_tokens == 2
    assert fine.flight.idle_frac < fine.waves.idle_frac


def test_rollouts_in_flight_of_the_configuration_are_taken():
    found = told("rollout.in_flight=96")
    assert (found.in_flight, found.configured) == (96, True)
    assert found.flight.kept_bytes == 8 * found.flight.kept_tokens > 0


def test_pages_that_give_out_before_the_slots_leave_an_eighth_free():
    """Room for 60 of 64 slots on each of 2 samplers: 120, less 15, in groups of 16; of slots alone all 128."""
    config = load_config("quickstart", SMALL)
    assert suggested(config, 60, samplers=2) == 96
    assert suggested(config, 64, samplers=2) == 128
    assert suggested(config, 4, samplers=1) == 16, "a group at least"


def test_a_step_has_its_other_phases_beside_sampling():
    found = told(time=READING, other_s=1000.0)
    for way in (found.waves, found.flight):
        assert way.step_s == way.seconds + 1000
        assert 0 < way.read_s < way.seconds


def test_without_dynamic_sampling_nothing_is_thrown_away():
    config = load_config("quickstart", [*SMALL, "dynamic_sampling.enabled=false"])
    config = replace(config, rollout=RolloutConfig(in_flight=64, round_tokens=8))
    work = workload_of(config, Assumptions(response_tokens=16, response_tokens_std=12))
    found = expected_step(config, work, slot_pages(64, 56), samplers=1, room=64.0)
    for way in (found.waves, found.flight):
        assert way.thrown_away_tokens == 0
        assert way.drawn_tokens == pytest.approx(64 * 16 * 16, rel=0.1)


def test_turns_of_the_configuration_are_read_again_where_no_bit_may_depend_on_how():
    """192 x 16 episodes of 16 tokens on average behind 8 of a prompt, of two turns: 3072 x (8 + 8) tokens."""
    turns = ["environment.source=guess", "environment.max_turns=2"]
    fed, plain, again = told(*turns), told(), told(*turns, "sampling.batch_invariant=true")
    assert fed.waves == plain.waves
    assert again.waves.read_again_tokens == pytest.approx(3072 * 16, rel=0.05)
    assert again.flight.read_again_tokens > fed.flight.read_again_tokens
