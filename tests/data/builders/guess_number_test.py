"""The numbers to guess: splits, and the searches of demonstrations."""

import itertools
import re

from dapo_jax.data.builders import guess_number
from dapo_jax.data.builders.guess_number import (
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
    """Each guess of a search with its answer, which is empty after the last."""
    found = re.findall(r"([0-9]{2})\?([<>]?)", text)
    assert "".join(f"{guess}?{answer}" for guess, answer in found) == text
    return [(int(guess), answer) for guess, answer in found]


def test_splits_are_disjoint_and_together_all_pairs():
    splits = split_pairs()
    assert {name: len(pairs) for name, pairs in splits.items()} == {
        "train": 504,
        "test": 126,
        "demonstrations": 630,
    }
    assert sorted(splits["demonstrations"]) == PAIRS
    assert sorted(splits["train"] + splits["test"]) == PAIRS


def test_held_out_pairs_have_ranges_and_numbers_that_are_trained_on():
    """Every held-out range and nearly all numbers occur in training; the others are in at most two ranges."""
    splits = split_pairs()
    lows, numbers = (set(side) for side in zip(*splits["train"], strict=True))
    assert {low for low, _ in splits["test"]} <= lows == set(LOWS)
    alone = {number for _, number in splits["test"]} - numbers
    assert all(sum(number == other for _, other in PAIRS) <= 2 for number in alone)


def test_patience_finds_every_number():
    """63 = 2^6 - 1 numbers: each guess that is not right leaves 31, 15, 7, 3, 1."""
    lengths = [len(guesses(demonstration(low, number, patience=1.0))) for low, number in PAIRS]
    assert [lengths.count(length) for length in range(1, 8)] == [10 * 2**k for k in range(6)] + [0]


def test_answers_are_true_and_a_search_ends_at_the_number_or_with_patience():
    for (low, number), draw in itertools.product(PAIRS, range(3)):
        search, left = guesses(demonstration(low, number, draw)), (low, low + WIDTH - 1)
        for place, (guess, answer) in enumerate(search):
            assert low <= guess < low + WIDTH
            assert answer == {guess < number: ">", guess > number: "<"}.get(True, "")
            if guess != middle(*left):
                assert place == len(search) - 1, "nothing follows a guess out of impatience"
                break
            left = (guess + 1, left[1]) if guess < number else (left[0], guess - 1)
        assert len(search) <= GUESSES


def test_the_player_is_patient_three_times_in_four():
    """And takes the middle in 1/63 of the rest by chance. A search of depth d is found by 0.75^d: 0.25 over all 63 numbers, and some by chance."""
    patient = total = found = 0
    for (low, number), draw in itertools.product(PAIRS, range(20)):
        search = [guess for guess, _ in guesses(demonstration(low, number, draw))]
        total, patient = total + 1, patient + (search[0] == middle(low, low + WIDTH - 1))
        found += search[-1] == number
    # Standard errors: sqrt(.75 x .25 / 12,600) = 0.004.
    assert abs(patient / total - (0.75 + 0.25 / 63)) < 0.02
    expected = sum(2**k / 63 * 0.75 ** (k + 1) for k in range(6))
    assert expected < found / total < expected + 0.03


def test_the_model_knows_every_character():
    text = "".join(prompt_text(low) + demonstration(low, number) for low, number in PAIRS)
    assert set(text) == set(guess_number.ALPHABET)
    tokenizer = CharTokenizer(guess_number.ALPHABET)
    assert tokenizer.decode(tokenizer.encode(text)) == text
