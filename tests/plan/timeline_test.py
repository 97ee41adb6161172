"""Responses in slots: starts and times by hand, and beside a loop over single steps."""

import numpy as np
import pytest

from dapo_jax.plan.timeline import by_sampler, decoded, starts_of


def test_a_table_has_a_row_for_each_sampler():
    sampler = np.array([2, 0, 2, 0, 0])
    one, two = by_sampler(sampler, 3, np.arange(1, 6), np.arange(10.0, 60.0, 10.0))
    assert one.tolist() == [[2, 4, 5], [0, 0, 0], [1, 3, 0]]
    assert two.tolist() == [[20, 40, 50], [0, 0, 0], [10, 30, 0]]


def test_the_next_in_line_takes_the_first_slot_that_is_free():
    """Two slots and lengths 3, 1, 2, 2: the third follows the second at step 1, the last starts at step 3, when both are free. Beside it a sampler with less to do."""
    lengths = np.array([[3, 1, 2, 2], [5, 0, 0, 0]])
    starts = starts_of(lengths, 2)
    assert starts.tolist() == [[0, 0, 1, 3], [0, 0, 0, 0]]
    found = decoded(starts, lengths, np.zeros((2, 4)), lambda live, held: np.ones(live.shape))
    assert found.steps.tolist() == [5, 5]
    assert found.seconds.tolist() == [5, 5]
    assert found.live_s.tolist() == [8, 5]


def test_a_step_takes_what_lies_in_the_slots_then():
    """A response of 3 tokens behind 10 attends to 10, 11, 12; one of 1 token behind 4 to 4. A step takes 100 for each response and 1 for each token."""
    found = decoded(
        np.array([[0, 0]]), np.array([[3, 1]]), np.array([[10.0, 4.0]]), lambda live, held: 100 * live + held
    )
    assert found.seconds.tolist() == [200 + 14 + 100 + 11 + 100 + 12]
    assert found.live_s.tolist() == [2 * 214 + 111 + 112]


@pytest.mark.parametrize("seed", range(10))
def test_the_times_are_those_of_a_loop_over_steps(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 20, (3, 12))
    held = rng.integers(1, 50, (3, 12)).astype(float)
    places = int(rng.integers(1, 8))

    def time(live, tokens):
        return np.maximum(3.0 * live, 7.0) + 0.5 * tokens

    found = decoded(starts := starts_of(lengths, places), lengths, held, time)
    for sampler in range(3):
        seconds, live_s, step = 0.0, 0.0, 0
        while (live := (starts[sampler] <= step) & (step < starts[sampler] + lengths[sampler])).any():
            assert live.sum() <= places
            one = time(live.sum(), (held[sampler] + step - starts[sampler])[live].sum())
            seconds, live_s, step = seconds + one, live_s + live.sum() * one, step + 1
        assert found.steps[sampler] == step
        assert found.seconds[sampler] == pytest.approx(seconds)
        assert found.live_s[sampler] == pytest.approx(live_s)
