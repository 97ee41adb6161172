"""Graders: a response's text and the reference answer in, a verdict out. No shaping here."""

import re
from collections.abc import Callable

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.dapo_grader import dapo_boxed_grader, dapo_grader
from dapo_jax.rewards.gsm8k_grader import gsm8k_grader, unread_by_gsm8k
from dapo_jax.rewards.math_grader import math_grader, unread_by_math

Grader = Callable[[str, str], Verdict]
"""grader(response_text, answer) -> Verdict."""

_INTEGER = re.compile(r"(-?)([0-9]+)")


def exact_grader(marker: str = "=") -> Grader:
    """A grader that compares what follows the last `marker` with the answer; empty marker: the whole response.

    Both are trimmed of white space. They match as equal strings, or as equal integers if both are written as
    an optional minus and ASCII digits: "0132" is 132; "+132", "132.0" and "1,320" are only themselves.

    >>> grade = exact_grader("=")
    >>> grade("40+80=120=132", "132").correct, grade("132", "132").correct
    (True, False)
    """

    def grade(response: str, answer: str) -> Verdict:
        _, found, after = response.rpartition(marker) if marker else ("", "whole", response)
        if not found:
            return Verdict(correct=False, reason=f"no {marker!r} in the response")
        extracted = after.strip()
        if not extracted:
            what = f"nothing after the last {marker!r}" if marker else "the response is empty"
            return Verdict(correct=False, reason=what)
        expected = answer.strip()
        if extracted == expected:
            return Verdict(correct=True, extracted=extracted, reason="equal")
        if (value := _integer(extracted)) is not None and value == _integer(expected):
            return Verdict(correct=True, extracted=extracted, reason=f"equal to {expected} as an integer")
        return Verdict(correct=False, extracted=extracted, reason=f"expected {expected!r}")

    return grade


GRADERS: dict[str, Grader] = {
    "exact": exact_grader("="),
    "dapo": dapo_grader,
    "dapo_boxed": dapo_boxed_grader,
    "math": math_grader,
    "gsm8k": gsm8k_grader,
}
"""Graders by the name that a configuration gives them."""

UNREAD_BY: dict[str, Callable[[str], bool]] = {"math": unread_by_math, "gsm8k": unread_by_gsm8k}
"""For each grader that reads references: whether it cannot read this one as a whole, and so compares it as text."""

TEXT_RULES = frozenset(GRADERS) - {"math"}
"""The graders that only compare text: they take microseconds and cannot hang, so they need no worker."""


def _integer(text: str) -> str | None:
    """The canonical text of an integer. Text, because `int` refuses the thousands of digits a model may write."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match[2].lstrip("0") or "0"
    return digits if digits == "0" else match[1] + digits
