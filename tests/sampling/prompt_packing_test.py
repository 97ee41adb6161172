"""Packing of prompts into rows: each prompt is whole, once, at its reported place, in few shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.sampling.prompt_packing import PrefillShape, pack_prompts, prefill_shape


def numbered(lengths):
    """Prompts without a common token."""
    ends = np.cumsum(lengths)
    return [
        np.arange(end - length, end, dtype=np.int32) + 1 for end, length in zip(ends, lengths, strict=True)
    ]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.integers(1, 4))
def test_each_prompt_is_whole_at_its_place_once(lengths, rows):
    """Only prompts that fit into a row are packed."""
    prompts, shape = numbered(lengths), PrefillShape(rows=rows, width=40, longest=40)
    asked = [index for index, length in enumerate(lengths) if length <= 40]
    calls = pack_prompts(prompts, asked, shape) if asked else []
    assert sorted(index for call in calls for index in call.indices) == asked
    for call in calls:
        for place, index in enumerate(call.indices):
            row, start, length = call.rows[place], call.starts[place], call.lengths[place]
            cut = row, slice(start, start + length)
            assert call.tokens[cut].tolist() == prompts[index].tolist()
            assert call.positions[cut].tolist() == list(range(len(prompts[index])))
            (segment,) = set(call.segment_ids[cut].tolist())
            assert segment > 0
            assert (call.segment_ids[row] == segment).sum() == len(prompts[index])
        used = sum(lengths[index] for index in call.indices)
        assert (call.tokens > 0).sum() == (call.segment_ids > 0).sum() == used
        # There are two programs. Missing prompts have length 1 at the start of row 0, a valid place.
        assert call.tokens.shape in {(1, 40), (rows, 40)}
        assert len(call.lengths) == len(call.tokens) * shape.row_prompts
        assert call.lengths[len(call.indices) :].tolist() == [1] * (len(call.lengths) - len(call.indices))


@pytest.mark.parametrize(
    ("width", "lengths", "shapes"),
    [
        (16, [3], [1]),
        (16, [16] * 4, [4]),
        (16, [16] * 5, [4, 1]),  # a row is left over
        (16, [16] * 6, [4, 4]),  # a call of 64 tokens takes as long as one of 16
        (16, [10, 8, 8, 6, 1], [4]),  # 10 + 6 | 8 + 8 | 1: three rows
        # Where rows are wide, half a call or less is read row by row.
        (128, [128] * 2, [1, 1]),
        (128, [128] * 3, [4]),
        (128, [128] * 6, [4, 1, 1]),
        (128, [128] * 7, [4, 4]),
    ],
    ids=str,
)
def test_a_call_has_all_rows_or_one(width, lengths, shapes):
    shape = PrefillShape(rows=4, width=width, longest=width)
    calls = pack_prompts(numbered(lengths), range(len(lengths)), shape)
    assert [len(call.tokens) for call in calls] == shapes


def test_a_row_has_no_more_prompts_than_there_are_logits_for():
    """40 prompts of 2 tokens would fit into one row of 80; 16 a row are three rows."""
    calls = pack_prompts(numbered([2] * 40), range(40), PrefillShape(rows=4, width=80, longest=80))
    assert [len(call.indices) for call in calls] == [40]
    assert len({*calls[0].rows[:40]}) == 3


@pytest.mark.parametrize(
    ("longest", "capacity", "prompts", "tokens", "shape"),
    [
        (2048, 22_528, 18, 8192, (4, 2048)),  # as many rows as the tokens allow
        (2048, 22_528, 2, 8192, (2, 2048)),  # no more than there are prompts
        (9, 24, 8, 4096, (8, 16)),  # no narrower than 16
        (40, 46, 8, 4096, (8, 46)),  # no wider than a slot
        (6000, 8192, 8, 4096, (1, 4096)),  # longer ones are read in parts
    ],
)
def test_rows_are_as_wide_as_the_longest_prompt_and_as_many_as_are_read_at_a_time(
    longest, capacity, prompts, tokens, shape
):
    made = prefill_shape(longest=longest, capacity=capacity, prompts=prompts, tokens=tokens)
    assert (made.rows, made.width) == shape
