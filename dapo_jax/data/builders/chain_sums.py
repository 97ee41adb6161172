"""Generated sums of 2 to 12 labelled digits, with demonstrations for a warm start. For a very small model, they range from trivial to impossible.

A prompt is `a7b5c8`, and the answer is the last digit of 7 + 5 + 8. A response ends in `=0`, and a grader uses the text after
the `=`. There are four styles:

    direct      =0                     the answer alone, the most frequent style; with many terms, a guess (10% correct)
    brief       :b2c0=0                the last digit of each running total, 2 characters per term
    careful     :b7+5>2,c2+8>0=0       each addition in full, 7 characters per term
    rambling    the careful steps several times, separated by `?`

Reasoning steps improve accuracy, but they are rare in the demonstrations, especially for long sums. With a limit of 48 tokens, careful
steps for 8 or more terms are cut off, while brief steps always fit. A response that is cut off has no `=`, so
it is never correct by accident.

All random choices depend only on SPLIT_SEED and the question. If a constant in this module changes, a new dataset is prepared.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from dapo_jax.data.own_builder import OwnBuilder, chosen, named, uniform

LABELS = "abcdefghijkl"
ALPHABET = f"0123456789{LABELS}+>=:,?"
"""All characters that occur in prompts and responses."""
DIGITS = range(1, 10)
TERMS = range(2, 13)
"""Possible numbers of terms in a sum. Each occurs in the same number of rows. There are few distinct sums of two or three terms, so these
sums are repeated, and `warm_start` and `train` share the sums of two terms."""
LONG = 9
"""Sums with at least this many terms use `LONG_STYLE_WEIGHTS`."""
SPLIT_SEED = 0
QUESTIONS = {"warm_start": 3000, "train": 400, "test": 24}
"""Number of rows in each split for each number of terms. Except for sums of two terms, `warm_start` and `train` share no questions,
because rewards for memorized answers would hide whether reasoning steps help."""
STYLE_WEIGHTS = {"direct": 0.75, "brief": 0.10, "careful": 0.10, "rambling": 0.05}
LONG_STYLE_WEIGHTS = {"direct": 0.94, "brief": 0.04, "careful": 0.02}
MAX_REPEATS = 2
DEMONSTRATIONS = {"warm_start": 2, "train": 1, "test": 1}
"""Number of demonstrations per question, by split."""

Question = tuple[int, ...]
"""A question, as the terms of its sum."""


def prompt_text(terms: Question) -> str:
    """Returns the prompt for a question.

    >>> prompt_text((7, 5, 8))
    'a7b5c8'
    """
    return "".join(f"{label}{term}" for label, term in zip(LABELS, terms, strict=False))


def answer_text(terms: Question) -> str:
    """Returns the last digit of the sum."""
    return str(sum(terms) % 10)


def response_text(terms: Question, style: str, repeats: int = 0) -> str:
    """Returns a response that ends in the correct answer.

    >>> response_text((7, 5, 8), "direct"), response_text((7, 5, 8), "brief"), response_text((7, 5, 8), "careful")
    ('=0', ':b2c0=0', ':b7+5>2,c2+8>0=0')
    >>> response_text((7, 5), "rambling", 1)
    ':b7+5>2?b7+5>2=2'
    """
    answer = f"={answer_text(terms)}"
    if style == "direct":
        return answer
    totals = [total % 10 for total in itertools.accumulate(terms)]
    steps = list(zip(LABELS[1:], totals, terms[1:], totals[1:], strict=False))
    if style == "brief":
        return ":" + "".join(f"{label}{after}" for label, _, _, after in steps) + answer
    careful = ",".join(f"{label}{before}+{term}>{after}" for label, before, term, after in steps)
    return ":" + "?".join([careful] * (1 + repeats)) + answer


def draw_style(terms: Question, draw: int) -> tuple[str, int]:
    """Returns the response style and the number of repeated steps for demonstration number `draw` of a question."""
    weights = LONG_STYLE_WEIGHTS if len(terms) >= LONG else STYLE_WEIGHTS
    style = chosen(weights, uniform("style", SPLIT_SEED, prompt_text(terms), draw))
    if style != "rambling":
        return style, 0
    return style, 1 + int(uniform("repeats", SPLIT_SEED, prompt_text(terms), draw) * MAX_REPEATS)


def split_questions() -> dict[str, list[Question]]:
    """Returns the shuffled questions of each split. Only `train` and `warm_start` share questions, the sums of two terms."""
    splits: dict[str, list[Question]] = {split: [] for split in QUESTIONS}
    for count in TERMS:
        questions = _questions_of(count)
        splits["test"] += itertools.islice(questions, QUESTIONS["test"])
        train = list(itertools.islice(questions, QUESTIONS["train"]))
        splits["train"] += itertools.islice(itertools.cycle(train), QUESTIONS["train"])
        others = list(itertools.islice(questions, QUESTIONS["warm_start"])) or train
        splits["warm_start"] += itertools.islice(itertools.cycle(others), QUESTIONS["warm_start"])
    return {split: sorted(questions, key=_shuffling_key) for split, questions in splits.items()}


def _questions_of(count: int) -> Iterator[Question]:
    """Yields distinct sums of `count` terms in random order."""
    if count <= 3:
        yield from sorted(itertools.product(DIGITS, repeat=count), key=_shuffling_key)
        return
    seen: set[Question] = set()
    for number in itertools.count():
        luck = (uniform("term", SPLIT_SEED, count, number, term) for term in range(count))
        terms = tuple(DIGITS[int(chance * len(DIGITS))] for chance in luck)
        if terms not in seen:
            seen.add(terms)
            yield terms


def _shuffling_key(terms: Question) -> float:
    return uniform("split", SPLIT_SEED, prompt_text(terms))


class Builder(OwnBuilder):
    """TFDS builder for the sums. Rows are in the order of `split_questions`."""

    name = "chain_sums"
    DESCRIPTION = "Sums of 2 to 12 labelled digits with demonstrations in several styles."
    LISTS = ("responses",)
    BUILDER_CONFIGS: ClassVar = named(
        "mix",
        [[*DIGITS], [*TERMS], LONG, SPLIT_SEED, QUESTIONS, MAX_REPEATS, DEMONSTRATIONS],
        [STYLE_WEIGHTS, LONG_STYLE_WEIGHTS],
        [response_text((7, 5, 8), style) for style in ("direct", "brief", "careful")],
    )

    def splits(self) -> dict[str, Iterator[dict[str, Any]]]:
        """Returns the rows of each split."""
        return {split: _rows(terms, DEMONSTRATIONS[split]) for split, terms in split_questions().items()}


def _rows(questions: Sequence[Question], count: int) -> Iterator[dict[str, Any]]:
    for terms in questions:
        shown = [response_text(terms, *draw_style(terms, draw)) for draw in range(count)]
        yield {"prompt": prompt_text(terms), "answer": answer_text(terms), "responses": shown}
