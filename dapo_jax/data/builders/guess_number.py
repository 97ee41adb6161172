"""Generated searches for a number, with demonstrations of an impatient player to warm a model up on.

A prompt is the range, `08-70:`. What follows is a search: a guess of two digits, which `?` ends, and the answer, `>` if the number is higher, `<`
if it is lower, until the guess is right:

    08-70:39?>55?<47?

At each guess the impatient player takes the middle of what the answers leave with the chance `PATIENCE`; else any number of the range, after which the player gives
up. So the demonstrations know the format and what a middle is, and a quarter of them find the number; that patience finds every number within `GUESSES`
guesses is for reinforcement to find.

The rows are pairs of a range and a number. The pairs of `test` are not among those of `train`, which reinforcement asks; the split `demonstrations` has all pairs, with
many searches for each.
Everything drawn is a pure function of (SPLIT_SEED, pair): change a constant and a new dataset is prepared beside the old one.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from dapo_jax.data.builder_info import OwnInfo
from dapo_jax.data.uniform import uniform

ALPHABET = "0123456789-:?<>"
"""Every character of prompts and responses."""
WIDTH = 63
"""Numbers of a range, 2**6 - 1."""
LOWS = range(0, 37, 4)
"""The numbers with which a range begins; the highest number of all is 36 + 62 = 98."""
GUESSES = 6
"""The most guesses of a search: they find each of the 63 numbers if every guess is the middle."""
PATIENCE = 0.75
"""Chance that a guess of a demonstration is the middle."""
SPLIT_SEED = 0
TEST_PAIRS = 126
"""Pairs of a range and a number in the test split, of 10 x 63 = 630."""
DEMONSTRATIONS = {"train": 1, "test": 1, "demonstrations": 64}
"""Demonstrations of each pair, by split."""


def prompt_text(low: int) -> str:
    """The range that begins with `low`.

    >>> prompt_text(8)
    '08-70:'
    """
    return f"{low:02d}-{low + WIDTH - 1:02d}:"


def middle(low: int, high: int) -> int:
    """The guess that leaves as many numbers below as above, or one fewer.

    >>> middle(8, 70), middle(40, 70), middle(5, 5)
    (39, 55, 5)
    """
    return (low + high) // 2


def demonstration(
    low: int, number: int, draw: int = 0, *, seed: int = SPLIT_SEED, patience: float = PATIENCE
) -> str:
    """A search for `number` in the range from `low` by the impatient player.

    >>> demonstration(8, 47, patience=1.0)
    '39?>55?<47?'
    """
    left_low, left_high, text = low, low + WIDTH - 1, ""
    for guess_number in range(GUESSES):
        luck = uniform("guess", seed, low, number, draw, guess_number)
        patient = luck < patience
        at_random = low + int((luck - patience) / (1 - patience) * WIDTH) if not patient else 0
        guess = middle(left_low, left_high) if patient else at_random
        text += f"{guess:02d}?"
        if guess == number:
            return text
        text += ">" if guess < number else "<"
        if not patient:
            return text
        left_low, left_high = (guess + 1, left_high) if guess < number else (left_low, guess - 1)
    raise AssertionError(f"{number} is not among the {WIDTH} numbers from {low} on")


def split_pairs(seed: int = SPLIT_SEED) -> dict[str, list[tuple[int, int]]]:
    """All pairs of a range's first number and a number within it, shuffled by `seed` and cut into `train` and `test`; `demonstrations` has them all."""
    pairs = [(low, low + place) for low, place in itertools.product(LOWS, range(WIDTH))]
    # Ordering by a hash shuffles the same way under every version of every library.
    pairs.sort(key=lambda pair: uniform("split", seed, *pair))
    return {"train": pairs[:-TEST_PAIRS], "test": pairs[-TEST_PAIRS:], "demonstrations": pairs}


def _fingerprint() -> str:
    """Changes with every constant above and with the format, so that stale files are never read."""
    drawn = [
        SPLIT_SEED,
        [*LOWS],
        WIDTH,
        GUESSES,
        PATIENCE,
        TEST_PAIRS,
        DEMONSTRATIONS,
        demonstration(8, 47),
    ]
    return hashlib.blake2b(json.dumps(drawn).encode(), digest_size=4).hexdigest()


class Builder(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of the searches, in the order of `split_pairs`."""

    name = "guess_number"
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=f"range_{_fingerprint()}")]

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return OwnInfo(
            builder=self,
            description="Searches for a number within a range, with demonstrations of a careless player.",
            features=tfds.features.FeaturesDict(
                {
                    "prompt": text,
                    "answer": text,
                    "response": text,  # the first of `responses`
                    "responses": tfds.features.Sequence(text),
                }
            ),
            disable_shuffling=True,  # the pairs are shuffled already; row i stays pair i
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {
            split: self._generate_examples(pairs, DEMONSTRATIONS[split])
            for split, pairs in split_pairs().items()
        }

    def _generate_examples(
        self, pairs: list[tuple[int, int]], count: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, (low, number) in enumerate(pairs):
            shown = [demonstration(low, number, draw) for draw in range(count)]
            yield (
                index,
                {
                    "prompt": prompt_text(low),
                    "answer": str(number),
                    "response": shown[0],
                    "responses": shown,
                },
            )
