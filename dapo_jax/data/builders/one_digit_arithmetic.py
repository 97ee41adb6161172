"""Generated arithmetic for a model that can read already: every one-digit sum, difference and product.

A prompt is `7+5`, `7-5` or `7*5`, and the answer its value. Differences are never negative. There are 100 + 55 + 100
questions, few enough to be known by heart; the test split holds some that are never trained on. Since `3*4` may
be trained on where `4*3` is held out, what the test split measures is whether a model has become reliable at what it
learnt, not whether it discovered arithmetic.
"""

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from dapo_jax.data.builder_info import OwnInfo

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
OPERANDS = range(10)
SPLIT_SEED = 0
TEST_QUESTIONS = 100
"""The questions to evaluate on, of 255; the other 155 are the train split."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One operation on two one-digit numbers."""

    left: int
    operation: str
    right: int

    @property
    def text(self) -> str:
        """`7*5`."""
        return f"{self.left}{self.operation}{self.right}"

    @property
    def answer(self) -> int:
        """The value, at least 0."""
        return OPERATIONS[self.operation](self.left, self.right)


def questions() -> list[Question]:
    """All questions, operation by operation.

    >>> len(questions()), questions()[0].text, questions()[-1].text
    (255, '0+0', '9*9')
    """
    return [
        Question(left=left, operation=operation, right=right)
        for operation, left, right in itertools.product(OPERATIONS, OPERANDS, OPERANDS)
        if operation != "-" or left >= right
    ]


def split_questions(seed: int = SPLIT_SEED) -> dict[str, list[Question]]:
    """All questions, shuffled by `seed` and cut into `train` and `test`."""

    def place(question: Question) -> bytes:
        # Ordering by a hash shuffles the same way under every version of every library.
        return hashlib.blake2b(f"{seed} {question.text}".encode(), digest_size=8).digest()

    shuffled = sorted(questions(), key=place)
    return {"train": shuffled[TEST_QUESTIONS:], "test": shuffled[:TEST_QUESTIONS]}


class Builder(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of the questions, in the order of `split_questions`."""

    name = "one_digit_arithmetic"
    VERSION = tfds.core.Version("1.0.0")
    # The name says all that the constants decide: changed ones prepare a new dataset beside the old one.
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(name=f"seed_{SPLIT_SEED}_test_{TEST_QUESTIONS}"),
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return OwnInfo(
            builder=self,
            description="One-digit sums, differences and products.",
            features=tfds.features.FeaturesDict({"prompt": text, "answer": text, "operation": text}),
            disable_shuffling=True,  # the questions are shuffled already
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {split: self._generate_examples(found) for split, found in split_questions().items()}

    def _generate_examples(self, found: list[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, question in enumerate(found):
            row = {"prompt": question.text, "answer": str(question.answer), "operation": question.operation}
            yield index, row
