"""Built-in graders, which compare a response's text with the reference answer and return a verdict."""

import importlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache
from itertools import zip_longest
from typing import Any

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.hints import needing
from dapo_jax.rewards.dapo_grader import dapo_boxed_grader, dapo_grader
from dapo_jax.rewards.gsm8k_grader import gsm8k_grader, unread_by_gsm8k
from dapo_jax.rewards.math_grader import math_grader, unread_by_math
from dapo_jax.rewards.sample import Sample, whole_group

Grader = Callable[[str, str], Verdict]
"""A function `grader(response_text, answer)` that returns a Verdict."""

_INTEGER = re.compile(r"-?[0-9]+")


def exact_grader(marker: str = "=") -> Grader:
    """Returns a grader that compares the text after the last `marker` with the answer. If `marker` is empty, it compares the whole response.

    Surrounding white space is ignored. The texts are compared as strings, or as integers if both consist of ASCII digits with an
    optional minus sign. For example, "0132" equals "132", but "+132" and "132.0" do not.

    >>> grade = exact_grader("=")
    >>> grade("40+80=120=132", "132").correct, grade("132", "132").correct
    (True, False)
    """

    def grade(response: str, answer: str) -> Verdict:
        if marker not in response:
            return Verdict(correct=False, reason=f"no {marker!r} in the response")
        stated = response.rpartition(marker)[2] if marker else response
        extracted, expected = stated.strip(), answer.strip()
        if not extracted:
            reason = f"nothing after the last {marker!r}" if marker else "the response is empty"
            return Verdict(correct=False, reason=reason)
        if extracted == expected:
            return Verdict(correct=True, extracted=extracted, reason="equal")
        are_integers = _INTEGER.fullmatch(extracted) and _INTEGER.fullmatch(expected)
        if are_integers and Decimal(extracted) == Decimal(expected):  # `int` rejects thousands of digits
            return Verdict(correct=True, extracted=extracted, reason=f"equal to {expected} as an integer")
        return Verdict(correct=False, extracted=extracted, reason=f"expected {expected!r}")

    return grade


def math_verify_grader(response: str, answer: str) -> Verdict:
    r"""Grades with Math-Verify at its default settings, with the reference in `\boxed{}` as in verl. Its own time limits need the main thread, so they are off."""
    package = math_verify()
    gold, parsed = (package.parse(text, parsing_timeout=None) for text in (rf"\boxed{{{answer}}}", response))
    correct = package.verify(gold, parsed, timeout_seconds=None)
    reason = "equal" if correct else f"expected {answer!r}"
    return Verdict(correct=correct, extracted=str(parsed[-1]) if parsed else None, reason=reason)


@cache
def math_verify() -> Any:
    """Returns the package Math-Verify, and turns off its warnings of missing time limits. Raises ValueError if it is not installed."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    with needing("math-verify", "the grader math_verify needs the package math-verify"):
        return importlib.import_module("math_verify")


def reasoning_gym_grader(sample: Sample) -> Verdict:
    """Strips the response without its thoughts and grades it with the `score_answer` function of its reasoning-gym task.

    A score of at least 0.99 is correct. If `score_answer` raises, it probably could not parse the answer, so the answer counts as wrong.
    """
    row = sample.prompt.row
    if not {"task", "options", "entry"} <= set(row):
        raise ValueError(
            f"reward.grader=reasoning_gym needs rows from data.source=reasoning_gym:TASK; found a row with the fields {sorted(row)}"
        )
    if not (answer := sample.after_thoughts):
        return Verdict(correct=False, reason="the response is empty, except for thoughts")
    score_answer, like = _scorer(row["task"], json.dumps(row["options"], sort_keys=True))
    try:
        score = float(score_answer(answer, _restored(row["entry"], like)))
    except Exception as error:
        reason = f"{row['task']} cannot parse the answer: {type(error).__name__}: {error}"
        return Verdict(correct=False, extracted=answer, reason=reason)
    return Verdict(correct=score >= 0.99, extracted=answer, reason=f"{row['task']} scores it {score:.3g}")


@cache
def _scorer(task: str, options: str) -> tuple[Callable[[str, Any], float], Any]:
    package = importlib.import_module("reasoning_gym")  # an optional dependency
    dataset = package.create_dataset(task, seed=0, size=1, **json.loads(options))
    return dataset.score_answer, dataset[0]


def _restored(value: Any, like: Any) -> Any:
    """Returns a value that was stored as JSON, with the tuples and the types of keys of `like`, another value of the same form."""
    if isinstance(value, dict) and isinstance(like, dict):
        key = type(next(iter(like), ""))
        return {key(name): _restored(item, like.get(key(name))) for name, item in value.items()}
    if isinstance(value, list) and isinstance(like, list | tuple):
        pairs = zip_longest(value, like[: len(value)], fillvalue=like[-1] if like else None)
        return type(like)(_restored(*pair) for pair in pairs)
    return value


@whole_group
def kimi_length(samples: Sequence[Sample]) -> list[float]:
    """Returns 0.5 - (n - min(n)) / (max(n) - min(n)) for a response of n tokens, or 0 if all responses to the prompt have equal lengths.

    This is the length reward of Kimi k1.5 (https://arxiv.org/abs/2501.12599). For wrong responses, `grading.summed` replaces positive values with 0.
    """
    lengths = [sample.response_tokens for sample in samples]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    return [0.5 - (length - shortest) / spread if spread else 0.0 for length in lengths]


GRADERS: dict[str, Grader] = {
    "exact": exact_grader("="),
    "dapo": dapo_grader,
    "dapo_boxed": dapo_boxed_grader,
    "math": math_grader,
    "gsm8k": gsm8k_grader,
    "math_verify": math_verify_grader,
}
"""Built-in graders by their configuration names."""

UNREAD_BY: dict[str, Callable[[str], bool]] = {"math": unread_by_math, "gsm8k": unread_by_gsm8k}
"""For each grader that parses references, a function that returns True if the grader cannot parse a reference and therefore compares it as text."""

TEXT_RULES = frozenset(GRADERS) - {"math", "math_verify"}
"""Graders that only compare text. They take microseconds and cannot hang, so they need no worker process."""

ROW_GRADERS: dict[str, Any] = {"reasoning_gym": reasoning_gym_grader, "kimi_length": kimi_length}
"""Built-in graders, by name, that are called with a `Sample` or all samples of a group, because they use more than the text."""
