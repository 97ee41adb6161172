"""The virtual clock: which responses start, which groups are whole and when a step ends, from lengths and verdicts alone."""

import json
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.rollout.virtual_clock import ClockSizes, ResponseId, VirtualClock

ROUND = 8
"""Tokens that a response samples in a round."""


class World:
    """Lengths and verdicts of all responses, from a seed, and the state of a driver of the clock."""

    def __init__(self, sizes, *, seed, mixed=0.5):
        self.sizes, self.seed, self.mixed = sizes, seed, mixed
        self.drawn: dict[ResponseId, int] = {}
        self.started: list[ResponseId] = []
        self.judged: dict[int, bool] = {}
        self.steps: list[dict[int, int]] = []

    def length(self, one):
        return int(np.random.default_rng([self.seed, *one]).integers(1, 65))

    def informative(self, ordinal):
        return bool(np.random.default_rng([self.seed, ordinal, 99]).random() < self.mixed)

    def round(self, clock):
        """One round, and the steps that end with it."""
        self.sample(clock)
        while clock.step_ends:
            self.steps.append(end_step(clock))

    def sample(self, clock):
        """One round."""
        for one in clock.start():
            self.drawn[one] = 0
            self.started.append(one)
        assert len(self.drawn) == self.sizes.in_flight or self.sizes.max_staleness
        assert list(clock.in_flight()) == sorted(self.drawn)
        assert len(self.drawn) <= self.sizes.in_flight
        for one in self.drawn:
            self.drawn[one] += ROUND
        ended = [one for one, drawn in self.drawn.items() if drawn >= self.length(one)]
        for one in ended:
            del self.drawn[one]
        for ordinal in clock.end_round(ended):
            self.judged[ordinal] = self.informative(ordinal)
            clock.end_group(ordinal, informative=self.judged[ordinal])


def end_step(clock):
    ages = clock.choose()
    clock.end_step()
    return ages


def run(sizes, *, seed=0, rounds=200, clock=None, world=None, **options):
    clock, world = clock or VirtualClock(sizes), world or World(sizes, seed=seed, **options)
    for _ in range(rounds):
        world.round(clock)
    return clock, world


def sizes(**changes):
    return ClockSizes(**{"in_flight": 8, "samples_per_prompt": 4, "needed": 2, **changes})


any_sizes = st.builds(
    lambda groups, samples, needed, verdicts, age: ClockSizes(
        in_flight=groups * samples, samples_per_prompt=samples, needed=needed, answer_rounds=verdicts, max_staleness=age
    ),
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3),
)  # fmt: skip


@given(any_sizes, st.integers(0, 10_000), st.sampled_from([0.2, 0.5, 1.0]))
def test_every_ordinal_is_trained_on_once_or_has_no_signal_or_waits_or_is_in_flight(sizes, seed, mixed):
    clock, world = run(sizes, seed=seed, mixed=mixed)
    trained = Counter(ordinal for step in world.steps for ordinal in step)
    assert set(trained.values()) <= {1}
    for ordinal in range(clock.following.ordinal + (clock.following.index > 0)):
        states = (
            ordinal in trained,
            ordinal in world.judged and not world.judged[ordinal],
            ordinal in clock.ready,
            ordinal in clock.groups,
        )
        assert sum(states) == 1, (ordinal, states)
    assert world.started == sorted(world.started), "responses start in the order of (ordinal, index)"
    assert len(set(world.started)) == len(world.started)
    assert all(len(step) == sizes.needed for step in world.steps)


@given(any_sizes, st.integers(0, 10_000), st.integers(0, 60))
def test_a_restored_clock_continues_like_an_uninterrupted_one(sizes, seed, rounds):
    clock, world = run(sizes, seed=seed, rounds=rounds)
    again = VirtualClock.restored(json.loads(json.dumps(clock.state())))
    assert again == clock
    run(sizes, clock=again, world=world, rounds=20)
    whole, straight = run(sizes, seed=seed, rounds=rounds + 20)
    assert (again, world.steps) == (whole, straight.steps)


@given(any_sizes, st.integers(0, 10_000))
def test_ready_groups_do_not_pile_up(sizes, seed):
    """After a round fewer groups wait than a step needs, unless an older one holds the steps back."""
    clock, world = VirtualClock(sizes), World(sizes, seed=seed, mixed=1.0)
    for _ in range(100):
        world.round(clock)
        assert len(clock.ready) < sizes.needed or (sizes.max_staleness and clock.groups)


@given(any_sizes, st.integers(0, 10_000))
def test_no_group_gets_older_than_the_bound_allows(sizes, seed):
    """It is in flight for S steps at most, since steps are held back. Once ready, it waits for earlier groups among the (S + 1) N that are under way: for S + 1 steps at
    most, and the last one trains on it."""
    clock, world = VirtualClock(sizes), World(sizes, seed=seed, mixed=1.0)
    bound = sizes.max_staleness
    for _ in range(100):
        world.round(clock)
        if bound:
            assert all(clock.version - group.version <= bound for group in clock.groups.values())
            assert len(clock.groups) + len(clock.ready) <= (bound + 1) * sizes.needed
    # 100 rounds of 8 tokens for at least a response's 64 at a time.
    assert len(world.steps) >= 100 // 8 // (sizes.needed * sizes.samples_per_prompt) - 1
    if bound:
        assert all(age <= 2 * bound + 1 for step in world.steps for age in step.values())


@given(any_sizes, st.integers(0, 10_000), st.integers(1, 5))
def test_further_rounds_after_the_choice_are_for_later_steps(sizes, seed, further):
    """The step has the first groups of those that were ready when it was chosen. All groups that start before it ends have its version."""
    clock, world, chosen_before = VirtualClock(sizes), World(sizes, seed=seed), set()
    for _ in range(40):
        world.sample(clock)
        if not clock.step_ends:
            continue
        ready, version, begun = dict(clock.ready), clock.version, len(world.started)
        chosen = clock.choose()
        assert chosen == {ordinal: version - ready[ordinal] for ordinal in sorted(ready)[: sizes.needed]}
        for _ in range(further):
            world.sample(clock)
        new = {one.ordinal for one in world.started[begun:] if one.index == 0}
        assert all(clock.groups[ordinal].version == version for ordinal in new & clock.groups.keys())
        clock.end_step()
        assert clock.version == version + 1
        chosen_before |= chosen.keys()
        assert not chosen_before & clock.ready.keys()


def test_a_step_by_hand():
    """Groups of 2, both groups in flight at once, verdicts a round later, one informative group a step. Response (0, 1) is longer than the others."""
    clock = VirtualClock(sizes(in_flight=4, samples_per_prompt=2, needed=1, answer_rounds=1))
    assert clock.start() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert clock.end_round([ResponseId(0, 0), ResponseId(1, 0), ResponseId(1, 1)]) == []
    assert clock.start() == [(2, 0), (2, 1), (3, 0)], "in the order of ordinals, also half a group"
    assert clock.end_round([]) == [1], "group 1 was whole a round ago"
    clock.end_group(1, informative=True)
    assert clock.step_ends
    assert end_step(clock) == {1: 0}
    assert clock.end_round([ResponseId(0, 1)]) == []
    assert clock.start() == [(3, 1)]
    assert clock.end_round([]) == [0]
    clock.end_group(0, informative=True)
    assert end_step(clock) == {0: 1}, "its first token was sampled before the first update"


def test_a_step_is_held_back_for_a_group_that_would_get_too_old():
    clock = VirtualClock(sizes(in_flight=4, samples_per_prompt=2, needed=1, answer_rounds=0, max_staleness=1))

    def whole(ordinal):
        clock.start()
        assert clock.end_round([ResponseId(ordinal, 0), ResponseId(ordinal, 1)]) == [ordinal]
        clock.end_group(ordinal, informative=True)

    whole(1)
    assert end_step(clock) == {1: 0}
    whole(2)
    assert not clock.step_ends, "group 0 is in flight since the step before"
    whole(0)
    assert end_step(clock) == {0: 1}


@given(
    needed=st.integers(1, 12),
    wave=st.integers(1, 30),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 10_000),
    carries=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_waves_are_algorithm_1(needed, wave, share, seed, carries, order):
    """Six steps of random sizes, with groups that end in random order: the clock trains on the groups of Algorithm 1, and samples the same prompts in as many waves."""

    def informative(ordinal):
        return np.random.default_rng([seed, ordinal]).random() < share

    clock = VirtualClock(
        ClockSizes(in_flight=wave * 2, samples_per_prompt=2, needed=needed, answer_rounds=0, waves=True)
    )
    cursor, buffer = 0, []
    for _ in range(6):
        trained, waves, under_way = [], 0, []
        while not clock.step_ends:
            while started := clock.start():
                waves += 1
                under_way += [one.ordinal for one in started if one.index == 0]
            ordinal = under_way.pop(order.randrange(len(under_way)))
            clock.end_group(ordinal, informative=informative(ordinal))
        assert not under_way
        trained = sorted(end_step(clock))
        if not carries:
            clock.ready.clear()

        expected_waves = 0
        while len(buffer) < needed:  # Algorithm 1: sample a wave, filter, and go on until the buffer is full
            buffer += [ordinal for ordinal in range(cursor, cursor + wave) if informative(ordinal)]
            cursor, expected_waves = cursor + wave, expected_waves + 1
        assert (trained, clock.following, waves) == (buffer[:needed], (cursor, 0), expected_waves)
        buffer = buffer[needed:] if carries else []


def test_the_next_wave_starts_as_soon_as_it_is_certain_and_no_sooner():
    """Two groups needed, waves of two groups of one: while both could still be informative, a second wave could be for nothing."""
    clock = VirtualClock(ClockSizes(in_flight=2, samples_per_prompt=1, needed=2, answer_rounds=0, waves=True))
    assert clock.start() == [(0, 0), (1, 0)]
    assert clock.start() == []
    clock.end_group(1, informative=False)
    assert clock.start() == [(2, 0), (3, 0)], "one group under way is too few, whatever its verdict"
    clock.end_group(3, informative=True)
    clock.end_group(2, informative=True)
    assert clock.start() == []
    assert not clock.step_ends, "group 0 is under way, and comes first"
    clock.end_group(0, informative=True)
    assert list(end_step(clock)) == [0, 2]
