"""Generated searches for a number, with demonstrations of an impatient player for a warm start.

A prompt is the range, `08-70:`. A search follows: a guess of two digits with `?` at its end, and the answer, `>` if the number is
higher, `<` if it is lower, until the guess is right:

    08-70:39?>55?<47?

At each guess the impatient player takes the middle of the remaining range with probability `PATIENCE`, else any number of the whole
range, and then gives up. So the demonstrations show the format and the middle, and a quarter of them find the number.
Reinforcement learning has to discover that patience finds every number within `GUESSES` guesses.

The rows are pairs of a range and a number. `train` and `test` share no pair; `demonstrations` has all pairs, with
many searches for each. All random choices depend on SPLIT_SEED and the pair alone. A changed constant prepares a new dataset.
"""

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

from dapo_jax.data.own_builder import OwnBuilder, named, uniform

ALPHABET = "0123456789-:?<>"
"""Every character of prompts and responses."""
WIDTH = 63
"""Numbers of a range, 2**6 - 1."""
LOWS = range(0, 37, 4)
"""The first numbers of ranges; the highest number of all is 36 + 62 = 98."""
GUESSES = 6
"""Largest number of guesses: enough for each of the 63 numbers if every guess is the middle."""
PATIENCE = 0.75
"""Probability that a guess of a demonstration is the middle."""
SPLIT_SEED = 0
TEST_PAIRS = 126
"""Pairs of a range and a number in the test split, of 10 x 63 = 630."""
DEMONSTRATIONS = {"train": 1, "test": 1, "demonstrations": 64}
"""Demonstrations of each pair, by split."""


def prompt_text(low: int) -> str:
    """Returns the range that begins with `low`.

    >>> prompt_text(8)
    '08-70:'
    """
    return f"{low:02d}-{low + WIDTH - 1:02d}:"


def demonstration(low: int, number: int, draw: int = 0, *, patience: float = PATIENCE) -> str:
    """Returns a search for `number` in the range from `low` by the impatient player.

    >>> demonstration(8, 47, patience=1.0)
    '39?>55?<47?'
    """
    left_low, left_high, text = low, low + WIDTH - 1, ""
    for guess_number in range(GUESSES):
        luck = uniform("guess", SPLIT_SEED, low, number, draw, guess_number)
        patient = luck < patience
        if patient:
            guess = (left_low + left_high) // 2
        else:
            guess = low + int((luck - patience) / (1 - patience) * WIDTH)
        text += f"{guess:02d}?"
        if guess == number:
            return text
        text += ">" if guess < number else "<"
        if not patient:
            return text
        left_low, left_high = (guess + 1, left_high) if guess < number else (left_low, guess - 1)
    raise AssertionError(f"{number} is not among the {WIDTH} numbers from {low} on")


def split_pairs() -> dict[str, list[tuple[int, int]]]:
    """Returns the shuffled pairs of a range's first number and a number in it; `demonstrations` has all of them."""
    pairs = [(low, low + place) for low, place in itertools.product(LOWS, range(WIDTH))]
    pairs.sort(key=lambda pair: uniform("split", SPLIT_SEED, *pair))
    return {"train": pairs[:-TEST_PAIRS], "test": pairs[-TEST_PAIRS:], "demonstrations": pairs}


class Builder(OwnBuilder):
    """TFDS builder of the searches, in the order of `split_pairs`."""

    name = "guess_number"
    DESCRIPTION = "Searches for a number within a range, with demonstrations of a careless player."
    TEXTS = ("prompt", "answer", "response")
    LISTS = ("responses",)
    BUILDER_CONFIGS: ClassVar = named(
        "range",
        *(SPLIT_SEED, [*LOWS], WIDTH, GUESSES, PATIENCE, TEST_PAIRS, DEMONSTRATIONS, demonstration(8, 47)),
    )

    def splits(self) -> dict[str, Iterator[dict[str, Any]]]:
        """See `OwnBuilder.splits`; `response` is the first of `responses`."""
        return {split: _rows(pairs, DEMONSTRATIONS[split]) for split, pairs in split_pairs().items()}


def _rows(pairs: list[tuple[int, int]], count: int) -> Iterator[dict[str, Any]]:
    for low, number in pairs:
        shown = [demonstration(low, number, draw) for draw in range(count)]
        row = {"prompt": prompt_text(low), "answer": str(number)}
        yield row | {"response": shown[0], "responses": shown}
