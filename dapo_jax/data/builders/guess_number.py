"""A generated number-guessing game, with demonstrations by an impatient player for a warm start.

A prompt is the range, such as `08-70:`. In the search that follows, each guess has two digits and a `?`. The reply is `>` if the number
is higher or `<` if it is lower, until the guess is correct:

    08-70:39?>55?<47?

With probability `PATIENCE`, the impatient player guesses the middle of the remaining range. Otherwise, the player guesses a random number in the
whole range, and stops if it is wrong. So the demonstrations show the format and the bisection, but only a quarter of them find the number.
Reinforcement learning has to discover that always guessing the middle finds every number within `GUESSES` guesses.

Each row is a (range, number) pair. `train` and `test` share no pairs. `demonstrations` has all pairs, with many searches
for each. All random choices depend only on SPLIT_SEED and the pair. If a constant in this module changes, a new dataset is prepared.
"""

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

from dapo_jax.data.own_builder import OwnBuilder, named, uniform

ALPHABET = "0123456789-:?<>"
"""All characters that occur in prompts and responses."""
WIDTH = 63
"""Number of integers in a range: 2**6 - 1 = 63."""
LOWS = range(0, 37, 4)
"""Possible first numbers of a range. The highest number in any range is 36 + 62 = 98."""
GUESSES = 6
"""Maximum number of guesses. This is enough to find any of the 63 numbers if every guess is the middle of the remaining range."""
PATIENCE = 0.75
"""Probability that a guess in a demonstration is the middle of the remaining range."""
SPLIT_SEED = 0
TEST_PAIRS = 126
"""Number of pairs in the test split, out of 10 ranges x 63 numbers = 630."""
DEMONSTRATIONS = {"train": 1, "test": 1, "demonstrations": 64}
"""Number of demonstrations per pair, by split."""


def prompt_text(low: int) -> str:
    """Returns the prompt for the range that begins with `low`.

    >>> prompt_text(8)
    '08-70:'
    """
    return f"{low:02d}-{low + WIDTH - 1:02d}:"


def demonstration(low: int, number: int, draw: int = 0, *, patience: float = PATIENCE) -> str:
    """Returns an impatient player's search for `number` in the range that begins with `low`. `draw` selects one of many random searches.

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
    raise AssertionError(f"{number} is not one of the {WIDTH} numbers from {low} on")


def split_pairs() -> dict[str, list[tuple[int, int]]]:
    """Returns the shuffled pairs of each split. A pair is the first number of a range and a number in this range. `demonstrations` has all pairs."""
    pairs = [(low, low + offset) for low, offset in itertools.product(LOWS, range(WIDTH))]
    pairs.sort(key=lambda pair: uniform("split", SPLIT_SEED, *pair))
    return {"train": pairs[:-TEST_PAIRS], "test": pairs[-TEST_PAIRS:], "demonstrations": pairs}


class Builder(OwnBuilder):
    """TFDS builder for the searches. Rows are in the order of `split_pairs`."""

    name = "guess_number"
    DESCRIPTION = "Searches for a number within a range, with demonstrations by an impatient player."
    TEXTS = ("prompt", "answer", "response")
    LISTS = ("responses",)
    BUILDER_CONFIGS: ClassVar = named(
        "range",
        *(SPLIT_SEED, [*LOWS], WIDTH, GUESSES, PATIENCE, TEST_PAIRS, DEMONSTRATIONS, demonstration(8, 47)),
    )

    def splits(self) -> dict[str, Iterator[dict[str, Any]]]:
        """Returns the rows of each split. A row's `response` is the first of its `responses`."""
        return {split: _rows(pairs, DEMONSTRATIONS[split]) for split, pairs in split_pairs().items()}


def _rows(pairs: list[tuple[int, int]], count: int) -> Iterator[dict[str, Any]]:
    for low, number in pairs:
        shown = [demonstration(low, number, draw) for draw in range(count)]
        row = {"prompt": prompt_text(low), "answer": str(number)}
        yield row | {"response": shown[0], "responses": shown}
