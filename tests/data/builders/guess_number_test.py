"""The numbers to guess: splits, and the searches of demonstrations."""

import itertools
import re

from dapo_jax.data.builders import guess_number
from dapo_jax.data.builders.guess_number import GUESSES, LOWS, WIDTH, demonstration, prompt_text, split_pairs
from dapo_jax.text.tokenizers import CharTokenizer

PAIRS = [(low, low + place) for low, place in itertools.product(LOWS, range(WIDTH))]


def guesses(text):
    """Each guess of a search with its answer, which is empty after the last."""
    found = re.findall(r"([0-9]{2})\?([<>]?)", text)
    assert "".join(f"{guess}?{answer}" for guess, answer in found) == text
    return [(int(guess), answer) for guess, answer in found]


def test_splits_are_disjoint_and_together_all_pairs():
    splits = split_pairs()
    sizes = {name: len(pairs) for name, pairs in splits.items()}
    assert sizes == {"train": 504, "test": 126, "demonstrations": 630}
    assert sorted(splits["demonstrations"]) == PAIRS
    assert sorted(splits["train"] + splits["test"]) == PAIRS


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
            if guess != sum(left) // 2:
                assert place == len(search) - 1, "nothing follows a guess out of impatience"
                break
            left = (guess + 1, left[1]) if guess < number else (left[0], guess - 1)
        assert len(search) <= GUESSES


def test_the_model_knows_every_character():
    text = "".join(prompt_text(low) + demonstration(low, number) for low, number in PAIRS)
    assert set(text) == set(guess_number.ALPHABET)
    tokenizer = CharTokenizer(guess_number.ALPHABET)
    assert tokenizer.decode(tokenizer.encode(text)) == text
