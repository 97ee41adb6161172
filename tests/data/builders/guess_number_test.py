"""The numbers to guess: splits, and the searches of demonstrations."""

import itertools
import re

from dapo_jax.data import load_rows
from dapo_jax.data.builders import guess_number
from dapo_jax.data.builders.guess_number import (
    DEMONSTRATIONS,
    GUESSES,
    LOWS,
    WIDTH,
    demonstration,
    middle,
    prompt_text,
    split_pairs,
)
from dapo_jax.text import CharTokenizer

PAIRS = [(low, low + place) for low, place in itertools.product(LOWS, range(WIDTH))]


def guesses(text):
    """Each guess of a search with the answer to it, which is empty behind the last."""
    found = re.findall(r"([0-9]{2})\?([<>]?)", text)
    assert "".join(f"{guess}?{answer}" for guess, answer in found) == text
    return [(int(guess), answer) for guess, answer in found]


def test_splits_are_disjoint_and_together_all_pairs():
    splits = split_pairs()
    assert {name: len(pairs) for name, pairs in splits.items()} == {"train": 504, "test": 126}
    assert sorted(splits["train"] + splits["test"]) == PAIRS


def test_held_out_pairs_have_ranges_and_numbers_that_are_trained_on():
    """Or nothing could be known of them: every range, and all numbers but a few that one range or two have."""
    splits = split_pairs()
    lows, numbers = (set(side) for side in zip(*splits["train"], strict=True))
    assert {low for low, _ in splits["test"]} <= lows == set(LOWS)
    alone = {number for _, number in splits["test"]} - numbers
    assert all(sum(number == other for _, other in PAIRS) <= 2 for number in alone)


def test_splits_depend_on_the_seed_alone():
    assert split_pairs(0) == split_pairs(0)
    assert split_pairs(0) != split_pairs(1)
    assert split_pairs(0)["train"] != sorted(split_pairs(0)["train"])


def test_patience_finds_every_number():
    """63 = 2^6 - 1 numbers: each guess that is not right leaves 31, 15, 7, 3, 1."""
    lengths = [len(guesses(demonstration(low, number, begins=1.0, goes_on=1.0))) for low, number in PAIRS]
    assert [lengths.count(length) for length in range(1, 8)] == [10 * 2**k for k in range(6)] + [0]


def test_answers_are_true_and_a_search_ends_at_the_number_or_at_the_last_guess():
    for (low, number), draw in itertools.product(PAIRS, range(3)):
        search = guesses(demonstration(low, number, draw))
        for guess, answer in search[:-1]:
            assert answer == (">" if guess < number else "<")
            assert guess != number
        last, answer = search[-1]
        assert not answer
        assert last == number or len(search) == GUESSES
        assert all(low <= guess < low + WIDTH for guess, _ in search)


def test_patience_is_rare_and_once_gone_it_is_gone():
    """35% begin with the middle; of those, 80% go on at the next guess if there is one; and 1/63 do by chance. Some 20% find the number."""
    begun = went_on = found = total = could = 0
    for (low, number), draw in itertools.product(PAIRS, range(20)):
        search = [guess for guess, _ in guesses(demonstration(low, number, draw))]
        total, first = total + 1, middle(low, low + WIDTH - 1)
        found += search[-1] == number
        if search[0] == first:
            begun += 1
            if len(search) > 1:
                could += 1
                left = (first + 1, low + WIDTH - 1) if number > first else (low, first - 1)
                went_on += search[1] == middle(*left)
    # Standard errors: sqrt(.35 x .65 / 12,600) = 0.004, sqrt(.8 x .2 / 4,400) = 0.006.
    assert abs(begun / total - (0.35 + 0.65 / 63)) < 0.02
    assert abs(went_on / could - 0.35 / (0.35 + 0.65 / 63) * (0.8 + 0.2 / 63)) < 0.03
    assert 0.17 < found / total < 0.25


def test_the_model_knows_every_character():
    text = "".join(prompt_text(low) + demonstration(low, number) for low, number in PAIRS)
    assert set(text) == set(guess_number.ALPHABET)
    tokenizer = CharTokenizer(guess_number.ALPHABET)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_rows_on_disk_are_the_generated_ones_in_order(tmp_path):
    for split, pairs in split_pairs().items():
        rows = load_rows("guess_number", split, tmp_path)
        assert len(rows) == len(pairs)
        for row, (low, number) in list(zip(rows, pairs, strict=True))[:20]:
            shown = [demonstration(low, number, draw) for draw in range(DEMONSTRATIONS[split])]
            assert row == {
                "prompt": prompt_text(low),
                "answer": str(number),
                "response": shown[0],
                "responses": shown,
            }
