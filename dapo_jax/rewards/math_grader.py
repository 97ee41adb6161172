"""The grader `math`: equal in meaning, as the package math-verify sees it (https://github.com/huggingface/Math-Verify)."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.dapo_grader import behind_stated, last_boxed, last_stated, normal_form

TAIL_CHARACTERS = 2000
"""Only this much of a response's end is looked at: symbolic parsers are slow, and an answer comes last."""

_SENTENCE = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\s+[A-Za-z]{2,}")
# A thousands separator is followed by three digits; another comma parts the entries of a list.
_NUMBER = r"[-+]?\(?[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?\)?"
_LEFT_TO_DO = re.compile(rf"{_NUMBER}(?:(?:[-+*×·]|\\times|\\cdot){_NUMBER})+")  # noqa: RUF001
# White space goes too: optional spaces side by side in the pattern would take cubic time on a long run of them.
_WRAPPING = re.compile(r"\s|\$|\\[()\[\]]|\*\*|\\left|\\right|\\boxed|[{}]|\.$")


def math_grader(response: str, answer: str) -> Verdict:
    r"""Takes what the response states, and compares it in meaning with the reference.

    Stated is what the last `Answer:` says, or else the last `\boxed{}`, or else the response if it is one line of mathematics and nothing
    else, or else what follows words such as "the answer is". A number that just happens to stand in the text is no
    answer: of responses that state nothing, some would be right by accident.

    Equal text, brought to the normal form of the grader `dapo`, is correct without further ado. Otherwise both are parsed: 6/8
    is 3/4, 34% is 34, \frac12 is 0.5. A text that nothing can be parsed from is wrong, and so is a sum or product of numbers that is
    left to be worked out: 8 + 2 is the question again, and not 10.

    It has no limit of time of its own, so that a comparison that was given up is never taken for a wrong answer: let a `GradingPool`
    call it, whose limit makes such a response a lost one.
    """
    text = response[-TAIL_CHARACTERS:]
    stated, where = _statement(text)
    if stated is not None and normal_form(stated) == normal_form(answer):
        return Verdict(correct=True, extracted=normal_form(stated), reason=f"{where}: equal as text")
    found = _parsed(text, anchored=True) if stated is None else _parsed(_as_latex(stated))
    # The parser returns what it understood and, last, the text that it took. What is stated has a vote in the consensus
    # even if nothing is understood.
    said = stated if stated is not None else str(found[-1]) if found else None
    extracted = None if said is None else normal_form(said)
    if said is not None and _LEFT_TO_DO.fullmatch(_WRAPPING.sub("", said).strip("()")):
        return Verdict(correct=False, extracted=extracted, reason=f"{where}: left to be worked out")
    if not found:
        reason = f"{where}: nothing that can be read as mathematics"
        return Verdict(correct=False, extracted=extracted, reason=reason)
    correct = any(_are_equal(gold, one) for gold in _gold(answer) for one in found)
    reason = f"{where}: equal to {answer!r} in meaning" if correct else f"{where}: expected {answer!r}"
    return Verdict(correct=correct, extracted=extracted, reason=reason)


def _statement(text: str) -> tuple[str | None, str]:
    """The answer that the response gives, and where it says so."""
    stated = last_stated(text)
    # What comes last counts: a box behind the line of the last `Answer:`, or else that line.
    boxed = last_boxed(behind_stated(text))
    if boxed is not None:
        return boxed, r"in the last \boxed{}"
    if stated is not None:
        # Emphasis as in **Answer: 34** is opened before the word and closed behind the value.
        return stated.strip().strip("*_").strip(), "after the last 'Answer:'"
    whole = text.strip()
    if whole and "\n" not in whole and not _SENTENCE.search(whole):
        return whole, "the whole response"
    return None, "behind words such as 'the answer is'"


def _as_latex(stated: str) -> str:
    """A formula is read as LaTeX, unless it marks its mathematics itself or is a sentence around it."""
    marked = any(mark in stated for mark in ("$", r"\(", r"\["))
    return stated if marked or _SENTENCE.search(stated) else f"${stated}$"


class _UnreadableError(ValueError):
    """Nothing was read, perhaps for want of time: an exception is not kept in the cache."""


def _gold(answer: str) -> tuple[Any, ...]:
    try:
        return _read_gold(answer)
    except _UnreadableError:
        return ()


@lru_cache(maxsize=4096)
def _read_gold(answer: str) -> tuple[Any, ...]:
    found = tuple(_parsed(answer if "$" in answer else f"${answer}$"))
    if not found:
        raise _UnreadableError(answer)
    return found


def _parsed(text: str, *, anchored: bool = False) -> list[Any]:
    """The expressions that math-verify reads; `anchored`: only behind words that announce an answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse  # loads sympy

    kinds = [
        kind(try_extract_without_anchor=not anchored)
        for kind in (LatexExtractionConfig, ExprExtractionConfig)
    ]
    with _unlimited():
        try:
            return parse(text, extraction_config=kinds, parsing_timeout=0, raise_on_error=True)
        except MemoryError:
            raise
        except Exception:
            return []


def _are_equal(gold: Any, found: Any) -> bool:
    from math_verify import verify

    with _unlimited():
        try:
            return verify(gold, found, timeout_seconds=None, raise_on_error=True)
        except MemoryError:
            raise
        except Exception:
            return False


@contextmanager
def _unlimited() -> Iterator[None]:
    """math-verify warns where it is to keep no time; a pool keeps it."""
    loggers = [logging.getLogger(f"math_verify.{name}") for name in ("parser", "grader")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
