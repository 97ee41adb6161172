"""Generated sums of 2 to 12 labelled digits: from trivial to impossible for a very small model, with demonstrations to warm it up on.

A prompt is `a7b5c8`, and the answer the last digit of 7 + 5 + 8. A response ends in `=0`, and a grader takes what follows the
`=`. There are four styles:

    direct      =0                     what the demonstrations mostly show; right by luck, 1 in 10, where there are many terms
    brief       :b2c0=0                the last digit of each running total, 2 characters a term
    careful     :b7+5>2,c2+8>0=0       each addition written out, 7 characters a term
    rambling    the careful working, several times over, with `?` in between

Working out pays, and is rare in the demonstrations: most of all for long sums, which nearly always are answered at once. Under a limit
of 48 tokens the careful working of 8 terms and more is cut off, and the brief one always fits. A response that is cut off has no `=`, so
it is never right by accident.

Everything drawn is a pure function of (SPLIT_SEED, place): change a constant and a new dataset is prepared beside the old one.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from dapo_jax.data.builder_info import OwnInfo
from dapo_jax.data.uniform import uniform

LABELS = "abcdefghijkl"
ALPHABET = f"0123456789{LABELS}+>=:,?"
"""Every character of prompts and responses."""
DIGITS = range(1, 10)
TERMS = range(2, 13)
"""How many terms a sum may have. There are as many rows of each number; of two or three terms there are so few sums that they come
again, and those of two terms are in `warm_start` and `train` alike."""
LONG = 9
"""A sum of so many terms is long."""
SPLIT_SEED = 0
QUESTIONS = {"warm_start": 3000, "train": 400, "test": 24}
"""Rows of each number of terms. The questions of `warm_start` are not those of `train`: a model that has learnt answers by heart
would be rewarded for remembering them, and hide whether working out pays."""
STYLE_WEIGHTS = {"direct": 0.75, "brief": 0.10, "careful": 0.10, "rambling": 0.05}
LONG_STYLE_WEIGHTS = {"direct": 0.94, "brief": 0.04, "careful": 0.02}
MAX_REPEATS = 2
DEMONSTRATIONS = {"warm_start": 2, "train": 1, "test": 1}
"""Demonstrations of each question, by split."""

Question = tuple[int, ...]
"""The terms of a sum."""


def prompt_text(terms: Question) -> str:
    """The question.

    >>> prompt_text((7, 5, 8))
    'a7b5c8'
    """
    return "".join(f"{label}{term}" for label, term in zip(LABELS, terms, strict=False))


def answer_text(terms: Question) -> str:
    """The last digit of the sum."""
    return str(sum(terms) % 10)


def response_text(terms: Question, style: str, repeats: int = 0) -> str:
    """A response that ends in the right answer.

    >>> response_text((7, 5, 8), "direct"), response_text((7, 5, 8), "brief"), response_text((7, 5, 8), "careful")
    ('=0', ':b2c0=0', ':b7+5>2,c2+8>0=0')
    >>> response_text((7, 5), "rambling", 1)
    ':b7+5>2?b7+5>2=2'

    Raises:
        ValueError: an unknown style, or repeats that do not fit the style.
    """
    if style not in STYLE_WEIGHTS:
        raise ValueError(f"style must be one of {', '.join(STYLE_WEIGHTS)}; got {style!r}")
    if (repeats > 0) != (style == "rambling"):
        raise ValueError(f"only the style 'rambling' has repeats, at least 1; got {repeats} for {style!r}")
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
    """Style and repeats of demonstration number `draw` of a question."""
    weights = LONG_STYLE_WEIGHTS if len(terms) >= LONG else STYLE_WEIGHTS
    place = uniform("style", SPLIT_SEED, prompt_text(terms), draw) * sum(weights.values())
    edges = itertools.accumulate(weights.values())
    style = next((name for name, edge in zip(weights, edges, strict=True) if place < edge), [*weights][-1])
    if style != "rambling":
        return style, 0
    return style, 1 + int(uniform("repeats", SPLIT_SEED, prompt_text(terms), draw) * MAX_REPEATS)


def split_questions() -> dict[str, list[Question]]:
    """The questions of each split, shuffled; none of `test` is in another, and none of `train` with 3 terms or more."""
    found: dict[str, list[Question]] = {split: [] for split in QUESTIONS}
    for count in TERMS:
        drawn = _questions_of(count)
        found["test"] += itertools.islice(drawn, QUESTIONS["test"])
        train = list(itertools.islice(drawn, QUESTIONS["train"]))
        found["train"] += itertools.islice(itertools.cycle(train), QUESTIONS["train"])
        others = list(itertools.islice(drawn, QUESTIONS["warm_start"])) or train
        found["warm_start"] += itertools.islice(itertools.cycle(others), QUESTIONS["warm_start"])
    return {split: sorted(questions, key=_place) for split, questions in found.items()}


def _questions_of(count: int) -> Iterator[Question]:
    """Different sums of `count` terms, in an order without meaning; all there are if those are few."""
    if count <= 3:
        yield from sorted(itertools.product(DIGITS, repeat=count), key=_place)
        return
    seen: set[Question] = set()
    for number in itertools.count():
        terms = tuple(
            DIGITS[int(uniform("term", SPLIT_SEED, count, number, term) * len(DIGITS))]
            for term in range(count)
        )
        if terms not in seen:
            seen.add(terms)
            yield terms


def _place(terms: Question) -> float:
    return uniform("split", SPLIT_SEED, prompt_text(terms))


def _fingerprint() -> str:
    """Changes with every constant above and with the response formats, so that stale files are never read."""
    formats = [response_text((7, 5, 8), style) for style in ("direct", "brief", "careful")]
    sizes = [[*DIGITS], [*TERMS], LONG, SPLIT_SEED, QUESTIONS, MAX_REPEATS, DEMONSTRATIONS]
    weights = [STYLE_WEIGHTS, LONG_STYLE_WEIGHTS]
    return hashlib.blake2b(json.dumps([sizes, weights, formats]).encode(), digest_size=4).hexdigest()


class Builder(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of the sums, in the order of `split_questions`."""

    name = "chain_sums"
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=f"mix_{_fingerprint()}")]

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return OwnInfo(
            builder=self,
            description="Sums of 2 to 12 labelled digits with demonstrations in several styles.",
            features=tfds.features.FeaturesDict(
                {"prompt": text, "answer": text, "responses": tfds.features.Sequence(text)}
            ),
            disable_shuffling=True,  # the questions are shuffled already
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {
            split: self._generate_examples(questions, DEMONSTRATIONS[split])
            for split, questions in split_questions().items()
        }

    def _generate_examples(
        self, questions: Sequence[Question], count: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, terms in enumerate(questions):
            yield (
                index,
                {
                    "prompt": prompt_text(terms),
                    "answer": answer_text(terms),
                    "responses": [response_text(terms, *draw_style(terms, draw)) for draw in range(count)],
                },
            )
