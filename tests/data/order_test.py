"""The order of rows: every epoch whole and new, and the same as Grain's own resumable iterator."""

import grain
import pytest

from dapo_jax.data.order import row_order

ROWS = 40


def test_every_epoch_visits_every_row_once_in_a_new_order():
    row_at = row_order([range(ROWS)], seed=3, shuffle=True)
    epochs = [[row_at[epoch * ROWS + place] for place in range(ROWS)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != list(range(ROWS))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_order_depends_on_the_seed_alone():
    first, same, other = (row_order([range(ROWS)], seed=seed, shuffle=True) for seed in (3, 3, 4))
    assert [first[place] for place in range(ROWS)] == [same[place] for place in range(ROWS)]
    assert [first[place] for place in range(ROWS)] != [other[place] for place in range(ROWS)]


def test_without_shuffle_epochs_repeat_the_own_order():
    row_at = row_order([range(3)], seed=0, shuffle=False)
    assert [row_at[place] for place in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_far_places_are_reached_directly():
    assert 0 <= row_order([range(ROWS)], seed=3, shuffle=True)[10**12] < ROWS


def test_is_the_order_of_grains_iterator_resumed_from_its_saved_state():
    """One integer is the whole state: Grain's iterator, stopped and restored, goes on at the next place."""
    row_at = row_order([range(ROWS)], seed=5, shuffle=True)
    dataset = grain.MapDataset.source(list(range(ROWS))).seed(5).shuffle().repeat().to_iter_dataset()

    stopped = iter(dataset)
    before = [next(stopped) for _ in range(ROWS + 7)]
    state = stopped.get_state()

    resumed = iter(dataset)
    resumed.set_state(state)
    after = [next(resumed) for _ in range(ROWS)]

    assert before + after == [row_at[place] for place in range(2 * ROWS + 7)]


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        row_order([[]], seed=0, shuffle=True)


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        row_order([range(ROWS)], seed=-1, shuffle=False)


def test_a_mixture_draws_by_weight_and_each_part_goes_through_its_own_epochs():
    """Weights 3 and 1: of any 400 places 300 and 100, to within two; the parts' own orders are whole epochs."""
    order = row_order([range(10), range(10, 14)], weights=[3.0, 1.0], seed=2, shuffle=True)
    for start in (0, 7, 1001):
        drawn = [order[place] for place in range(start, start + 400)]
        assert abs(sum(row < 10 for row in drawn) - 300) <= 2
    first = [row for row in (order[place] for place in range(80)) if row < 10]
    second = [row for row in (order[place] for place in range(80)) if row >= 10]
    assert sorted(first[:10]) == sorted(first[10:20]) == list(range(10))
    assert sorted(second[:4]) == sorted(second[4:8]) == [10, 11, 12, 13]
    assert first[:10] != first[10:20]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_a_mixture_needs_a_weight_above_zero_for_each_part(weights):
    with pytest.raises(ValueError, match="one weight above 0 for each of its 2 datasets"):
        row_order([range(3), range(3)], weights=weights, seed=0, shuffle=True)
