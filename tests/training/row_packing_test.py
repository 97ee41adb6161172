"""Packing of pieces into rows, with lengths as in the paper's runs."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.training.row_packing import (
    Piece,
    attention_pairs,
    balanced_microbatches,
    distribute_pieces,
    even_rows,
    filled_tokens,
)

ROW = 2048 + 20_480
PAIRS = 2 * 487_587_840 / (4 * 40 * 128)
"""Number of attention pairs that cost as much as a token's products with the weights. Qwen2.5-32B has 5120 x (2 x 128 x (40 + 8) + 3 x 27,648) =
487,587,840 weights a layer, two operations each. A pair takes a product and a sum, twice, in each of 40 heads of 128."""


def piece(index, response, *, prompt=0, prompt_tokens=1):
    return Piece(rollouts=(index,), responses=(response,), prompt=prompt, prompt_tokens=prompt_tokens)


def of_one_prompt(*responses, prompt_tokens=1):
    return [piece(index, tokens, prompt_tokens=prompt_tokens) for index, tokens in enumerate(responses)]


def responses_of(packed):
    return [sorted((tokens for part in row for tokens in part.responses), reverse=True) for row in packed]


def as_in_the_paper(seed, *, groups, mean, sigma):
    """Returns pieces of prompts of about 250 tokens (at most 2048), each with 16 responses around a length of its own (at most 20,480)."""
    rng = np.random.default_rng(seed)

    def draw(around, deviation, low, high):
        return int(np.clip(rng.lognormal(np.log(around) - deviation**2 / 2, deviation), low, high))

    pieces = []
    for group in range(groups):
        prompt_tokens, length = draw(250, 0.6, 20, 2048), draw(mean, 0.5, 50, 20_480)
        for _ in range(16):
            response = draw(length, sigma, 50, 20_480)
            pieces.append(piece(len(pieces), response, prompt=group, prompt_tokens=prompt_tokens))
    return pieces


@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=40),
    room=st.integers(35, 90),
    multiple=st.integers(1, 6),
)
def test_every_piece_is_in_one_row_and_every_row_fits(sizes, room, multiple):
    pieces = [piece(i, tokens, prompt=p, prompt_tokens=p + 1) for i, (p, tokens) in enumerate(sizes)]
    packed = even_rows(pieces, room=room, multiple=multiple)
    assert len(packed) % multiple == 0
    assert max(map(filled_tokens, packed)) <= room
    found = {
        i: (p.prompt, tokens)
        for row in packed
        for p in row
        for i, tokens in zip(p.rollouts, p.responses, strict=True)
    }
    assert found == {i: (p, tokens) for i, (p, tokens) in enumerate(sizes)}
    assert sum(len(p.rollouts) for row in packed for p in row) == len(sizes)


def test_responses_to_a_prompt_are_chosen_to_fill_a_row():
    """6 + 4 + 2 and 5 + 4 + 3 are 12 and 12; longest first would make 6 + 5, 4 + 4 + 3 and 2."""
    packed = even_rows(of_one_prompt(6, 5, 4, 4, 3, 2), room=13, multiple=1)
    assert sorted(responses_of(packed)) == [[5, 4, 3], [6, 4, 2]]


def test_responses_to_a_prompt_stay_together_if_that_saves_rows():
    """Each prompt with its responses has 4 + 3 x 2 = 10 tokens, so two fit into a row of 20. Packed one by one, responses would need seven rows."""
    pieces = [piece(i, 2, prompt=i % 8, prompt_tokens=4) for i in range(24)]
    packed = even_rows(pieces, room=20, multiple=1)
    assert [filled_tokens(row) for row in packed] == [20] * 4


def test_bundles_that_do_not_fill_a_row_are_packed_one_by_one():
    """Rows of 10 tokens, prompts of 1: responses of 9 and 4 to the first prompt, of 4 to the second. The last two share a row with both prompts."""
    pieces = [*of_one_prompt(9, 4), piece(2, 4, prompt=1)]
    assert sorted(responses_of(even_rows(pieces, room=10, multiple=1))) == [[4, 4], [9]]


def test_responses_spread_over_all_rows():
    """All four fit into one row, but there must be four rows: each has one response and a copy of the prompt."""
    packed = even_rows(of_one_prompt(5, 5, 5, 5, prompt_tokens=2), room=64, multiple=4)
    assert responses_of(packed) == [[5]] * 4
    assert even_rows(of_one_prompt(5), room=64, multiple=3)[1:] == [[], []]


def test_without_room_every_piece_has_its_own_row():
    assert responses_of(even_rows(of_one_prompt(1, 7, 3), room=0, multiple=2)) == [[7], [3], [1], []]


def test_similar_rows_share_a_microbatch_with_balanced_parts():
    """Sorted: 8, 7, 6, 5 | 4, 3, 2, 1. The two parts of the first microbatch get 8 and 5, and 7 and 6."""
    packed = [[piece(i, tokens)] for i, tokens in enumerate((3, 8, 5, 1, 7, 2, 6, 4))]
    dealt = balanced_microbatches(packed, rows_per_microbatch=4, spread=2)
    assert list(map(responses_of, dealt)) == [[[8], [5], [7], [6]], [[4], [1], [3], [2]]]


SHAPES = [(32, 32), (64, 32), (32, 8), (8, 8)]
"""Rows of a microbatch, and groups of devices that share it."""


@pytest.mark.parametrize(("rows", "spread"), SHAPES)
@pytest.mark.parametrize(("mean", "sigma"), [(3000, 0.6), (5000, 0.7), (8000, 0.7), (8000, 1.0)])
def test_an_update_of_512_rollouts_has_the_fewest_microbatches_and_even_rows(mean, sigma, rows, spread):
    """No microbatch could be saved even if every prompt occurred once and responses could be split.

    The remaining padding is unavoidable: 32 rows of 22,528 tokens are 0.72M tokens, and 512 responses fill 2 to 5 such microbatches and a part of
    another. A row costs its tokens, including padding, and its pairs. A microbatch costs as much as its slowest devices.
    """
    pieces = as_in_the_paper(0, groups=32, mean=mean, sigma=sigma)
    even = even_rows(pieces, room=ROW, multiple=rows)
    packed = [*chain.from_iterable(balanced_microbatches(even, rows_per_microbatch=rows, spread=spread))]
    least = sum(p.response_tokens for p in pieces) + sum({p.prompt: p.prompt_tokens for p in pieces}.values())
    assert len(packed) == -(-least // (rows * ROW)) * rows
    cost = np.array([ROW + attention_pairs(row) / PAIRS for row in packed]).reshape(
        -1, spread, rows // spread
    )
    slower = cost.sum(2).max(1) / cost.sum(2).mean(1) - 1
    assert slower.mean() < 0.03
    assert slower.max() < 0.08


LENGTHS = (ROW, ROW // 2, ROW // 4, 3072, 1536)
"""The lengths that `training_pass` makes of rows of 22,528 tokens for splash attention on 4 devices: multiples of 512."""


@pytest.mark.parametrize(
    ("mean", "sigma"),
    [
        (5000, 0.7),
        (8000, 1.0),
        *(
            pytest.param(*lengths, marks=pytest.mark.slow)  # seconds each; the other cases cover them
            for lengths in [(1500, 0.6), (3000, 0.6), (8000, 0.7), (10_000, 0.6)]
        ),
    ],
)
def test_less_than_a_twentieth_of_a_step_is_padding_and_devices_are_balanced(mean, sigma):
    """16 updates of 32 groups on 32 devices. Without shorter rows, up to 47% of an update is padding.

    The busiest device has less than 5% more tokens than the mean. Packing cannot help if most responses reach their limit: a response of 20,480 tokens
    and a prompt of 250 fill 92% of a row. With a mean of 12,000 and a deviation of 0.5, 5.1% of a step is padding.
    """
    rows, computed, used, most = 32, 0, 0, 0.0
    for seed in range(16):
        pieces = as_in_the_paper(seed, groups=32, mean=mean, sigma=sigma)
        for length, packed in distribute_pieces(
            pieces, lengths=LENGTHS, rows_per_microbatch=rows, spread=rows
        ):
            tokens = list(map(filled_tokens, packed))
            computed, used, most = computed + rows * length, used + sum(tokens), most + max(tokens)
    assert used > 0.95 * computed
    assert most * rows < 1.05 * used


@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=40),
    rows=st.integers(1, 6),
)
def test_with_several_lengths_every_piece_is_in_one_row_that_fits(sizes, rows):
    pieces = [piece(i, tokens, prompt=p, prompt_tokens=p + 1) for i, (p, tokens) in enumerate(sizes)]
    made = distribute_pieces(pieces, lengths=(64, 40, 16, 8), rows_per_microbatch=rows, spread=1)
    assert all(len(packed) == rows for _, packed in made)
    assert all(filled_tokens(row) <= length for length, packed in made for row in packed)
    found = [i for _, packed in made for row in packed for p in row for i in p.rollouts]
    assert sorted(found) == list(range(len(sizes)))
    assert [length for length, _ in made] == sorted((length for length, _ in made), reverse=True)
