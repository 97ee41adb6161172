"""Generated arithmetic for pretrained models: every one-digit sum, difference and product.

A prompt is an expression such as `7+5`, `7-5` or `7*5`, and the answer is its value. Differences are never negative. There are
100 + 55 + 100 questions, few enough to memorize. Questions in the test split are never trained on. However, `3*4` may
be in the train split while `4*3` is in the test split. So the test split measures whether a model has become reliable, not whether
it has learned arithmetic from scratch.
"""

import hashlib
import itertools
import operator
from collections.abc import Callable
from typing import ClassVar

import tensorflow_datasets as tfds

from dapo_jax.data.own_builder import OwnBuilder

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERANDS = range(10)
SPLIT_SEED = 0
TEST_QUESTIONS = 100
"""Number of questions in the test split. The train split has the other 155 of the 255 questions."""


def questions() -> list[dict[str, str]]:
    """Returns all questions as rows, grouped by operation.

    >>> len(questions()), questions()[-1]
    (255, {'prompt': '9*9', 'answer': '81', 'operation': '*'})
    """
    return [
        {"prompt": f"{left}{sign}{right}", "answer": str(operation(left, right)), "operation": sign}
        for (sign, operation), left, right in itertools.product(OPERATIONS.items(), OPERANDS, OPERANDS)
        if sign != "-" or left >= right
    ]


def split_questions() -> dict[str, list[dict[str, str]]]:
    """Returns all questions, shuffled and split into `train` and `test`."""

    def digest(question: dict[str, str]) -> bytes:
        # Shuffles by sorting hashes, because the order is then the same in all library versions.
        return hashlib.blake2b(f"{SPLIT_SEED} {question['prompt']}".encode(), digest_size=8).digest()

    shuffled = sorted(questions(), key=digest)
    return {"train": shuffled[TEST_QUESTIONS:], "test": shuffled[:TEST_QUESTIONS]}


class Builder(OwnBuilder):
    """TFDS builder for the questions. Rows are in the order of `split_questions`."""

    name = "one_digit_arithmetic"
    DESCRIPTION = "One-digit sums, differences and products."
    TEXTS = ("prompt", "answer", "operation")
    # The name contains all constants, so a new dataset is prepared if a constant changes.
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=f"seed_{SPLIT_SEED}_test_{TEST_QUESTIONS}")]

    def splits(self) -> dict[str, list[dict[str, str]]]:
        """Returns the rows of each split."""
        return split_questions()
