"""Prompts in rows: each whole, once, where it is said to be, in shapes of which there are few."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.sampling.prompt_packing import pack_prompts


def numbered(lengths):
    """Prompts that have no token in common."""
    ends = np.cumsum(lengths)
    return [
        np.arange(end - length, end, dtype=np.int32) + 1 for end, length in zip(ends, lengths, strict=True)
    ]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=20))
def test_each_prompt_is_whole_where_it_is_said_to_be(lengths):
    packed = pack_prompts(numbered(lengths), capacity=70)
    for index, tokens in enumerate(numbered(lengths)):
        place = (
            packed.rows[index],
            slice(packed.starts[index], packed.starts[index] + packed.lengths[index]),
        )
        assert packed.tokens[place].tolist() == tokens.tolist()
        assert packed.positions[place].tolist() == list(range(len(tokens)))
        (segment,) = set(packed.segment_ids[place].tolist())
        assert segment > 0
        assert (packed.segment_ids[packed.rows[index]] == segment).sum() == len(tokens)
    assert (packed.tokens > 0).sum() == (packed.segment_ids > 0).sum() == sum(lengths)


@pytest.mark.parametrize(
    ("lengths", "shape", "count"),
    [
        ([3], (1, 16), 1),  # no narrower than 16
        ([17], (1, 32), 1),
        ([16, 16, 16], (4, 16), 4),  # three rows and three prompts, both rounded up
        ([10, 8, 8, 6, 1], (4, 16), 16),  # 10 + 6 | 8 + 8 | 1: 3 rows, 5 prompts
        ([33, 10, 10], (4, 46), 4),  # a row is no wider than a slot: 33 + 10 | 10
    ],
    ids=str,
)
def test_the_width_is_a_power_of_two_and_the_counts_are_powers_of_four(lengths, shape, count):
    packed = pack_prompts(numbered(lengths), capacity=46)
    assert packed.tokens.shape == shape
    assert len(packed.lengths) == count
    # Prompts that are not there have the length 1, at the front of row 0: a place that exists.
    assert packed.lengths[len(lengths) :].tolist() == [1] * (count - len(lengths))


def test_a_long_prompt_does_not_pad_the_short_ones():
    """One of 1,000 tokens and fifteen of 60 take 2 rows of 1,024, rounded to 4, where a row for each would be 16."""
    assert pack_prompts(numbered([60] * 15 + [1000]), capacity=2048).tokens.shape == (4, 1024)


@pytest.mark.parametrize("length", [0, 47])
def test_a_prompt_that_does_not_fit_is_refused(length):
    with pytest.raises(ValueError, match=f"prompt 1 has {length} tokens; a slot has room for 1 to 46"):
        pack_prompts([np.ones(4, np.int32), np.ones(length, np.int32)], capacity=46)
