"""Generated arithmetic: all sums of two two-digit numbers, with demonstrations for a warm start.

A prompt is `47+85`. A response ends in `=132`, and a grader uses the text after the last `=`. The reasoning steps add the
units first and carry as on paper:

    47+85:7+5=12,1+4+8=13=132
          units  carry+tens  answer: the tens' sum, then the last digit of the units' sum

The units' sum always has two digits (`3+4=07`), so its first digit is the carry that begins the next step. Every
character is then either copied from a known position or part of a one-digit sum, which a very small model can learn. A
response that is cut off within the reasoning steps is never correct by accident: the number after its last `=` is
at most 19, but the sum of two two-digit numbers is at least 20.

All random choices depend only on SPLIT_SEED and the pair of operands. If a constant in this module changes, a new dataset is prepared.
"""

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

from dapo_jax.data.own_builder import OwnBuilder, chosen, named, uniform

ALPHABET = "0123456789+=:,?"
"""All characters that occur in prompts and responses."""
OPERANDS = range(10, 100)
SPLIT_SEED = 0
TRAIN_PAIRS = 7100
"""Number of operand pairs in the train split. The test split has the other 1000 of the 90 x 90 = 8100 ordered pairs."""
STYLE_WEIGHTS = {"direct": 0.6, "working": 0.15, "rechecked": 0.25}
"""Probability of each response style: only the answer, reasoning steps before the answer, or the same steps repeated before the answer."""
RECHECK_AGAIN = 0.5
"""Probability of another recheck after each recheck. The number of rechecks has a geometric distribution, so response lengths have a long tail."""
MAX_RECHECKS = 4
DEMONSTRATIONS = {"train": 4, "test": 1}
"""Number of demonstrations per pair, by split."""


def working_text(left: int, right: int) -> str:
    """Returns the two reasoning steps for a sum, with the units first.

    >>> working_text(47, 85), working_text(13, 24)
    ('7+5=12,1+4+8=13', '3+4=07,0+1+2=3')
    """
    (left_tens, left_units), (right_tens, right_units) = divmod(left, 10), divmod(right, 10)
    units = left_units + right_units
    carry = units // 10
    return f"{left_units}+{right_units}={units:02d},{carry}+{left_tens}+{right_tens}={carry + left_tens + right_tens}"


def response_text(left: int, right: int, style: str, rechecks: int = 0) -> str:
    """Returns a response to `left+right` that ends in the correct answer.

    >>> response_text(47, 85, "direct")
    '=132'
    >>> response_text(47, 85, "working")
    ':7+5=12,1+4+8=13=132'
    >>> response_text(47, 85, "rechecked", 1)
    ':7+5=12,1+4+8=13?7+5=12,1+4+8=13=132'
    """
    answer = f"={left + right}"
    if style == "direct":
        return answer
    return ":" + "?".join([working_text(left, right)] * (1 + rechecks)) + answer


def draw_style(pair: int, draw: int = 0) -> tuple[str, int]:
    """Returns the response style and the number of rechecks for demonstration number `draw` of a pair. `pair` is `pair_number(left, right)`."""
    style = chosen(STYLE_WEIGHTS, uniform("style", SPLIT_SEED, pair, draw))
    if style != "rechecked":
        return style, 0
    luck = uniform("rechecks", SPLIT_SEED, pair, draw)
    return style, 1 + sum(luck < RECHECK_AGAIN**count for count in range(1, MAX_RECHECKS))


def demonstrations(left: int, right: int, *, count: int) -> list[tuple[str, str]]:
    """Returns the first `count` demonstrations for a pair, each as its style and its response."""
    sampled = [draw_style(pair_number(left, right), draw) for draw in range(count)]
    return [(style, response_text(left, right, style, rechecks)) for style, rechecks in sampled]


def pair_number(left: int, right: int) -> int:
    """Returns the index of a pair of operands among all ordered pairs, from 0 to 8099."""
    return (left - OPERANDS.start) * len(OPERANDS) + right - OPERANDS.start


def split_pairs() -> dict[str, list[tuple[int, int]]]:
    """Returns all ordered pairs of operands, shuffled and split into `train` and `test`."""
    pairs = list(itertools.product(OPERANDS, OPERANDS))
    pairs.sort(key=lambda pair: uniform("split", SPLIT_SEED, pair_number(*pair)))
    return {"train": pairs[:TRAIN_PAIRS], "test": pairs[TRAIN_PAIRS:]}


class Builder(OwnBuilder):
    """TFDS builder for the sums of two numbers. Rows are in the order of `split_pairs`."""

    name = "arithmetic"
    DESCRIPTION = "Sums of two two-digit numbers with demonstrations in several styles."
    TEXTS = ("prompt", "answer", "response", "style")
    LISTS = ("responses",)
    BUILDER_CONFIGS: ClassVar = named(
        "mix",
        *(SPLIT_SEED, TRAIN_PAIRS, STYLE_WEIGHTS, RECHECK_AGAIN, MAX_RECHECKS, DEMONSTRATIONS),
        [response_text(47, 85, "working"), response_text(47, 85, "rechecked", 2)],
    )

    def splits(self) -> dict[str, Iterator[dict[str, Any]]]:
        """Returns the rows of each split. A row's `response` is the first of its `responses`, and `style` is the style of this response."""
        return {split: _rows(pairs, DEMONSTRATIONS[split]) for split, pairs in split_pairs().items()}


def _rows(pairs: list[tuple[int, int]], count: int) -> Iterator[dict[str, Any]]:
    for left, right in pairs:
        styles, responses = zip(*demonstrations(left, right, count=count), strict=True)
        row = {"prompt": f"{left}+{right}", "answer": str(left + right)}
        yield row | {"response": responses[0], "style": styles[0], "responses": list(responses)}
