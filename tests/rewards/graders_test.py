"""The exact grader: what counts as the answer, and what counts as equal."""

import pytest

from dapo_jax.rewards.graders import GRADERS, exact_grader


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("=132", "132", True),
        ("40+80=120,7+5=12=132", "132", True),  # what follows the last marker counts
        ("=132=133", "132", False),  # an answer taken back is no answer
        ("=132,", "132", False),
        ("= 132\n", " 132 ", True),
        ("=0132", "132", True),  # equal integers
        ("=-07", "-7", True),
        ("=-0", "0", True),
        ("=7", "-7", False),
        ("=+132", "132", False),  # a plus is not part of a plain integer
        ("=132.0", "132", False),
        ("=1,320", "1320", False),
        ("=\u0661\u0663\u0662", "132", False),  # Arabic-Indic digits are not ASCII digits
        ("=1 32", "132", False),
        ("=blue", "blue", True),
        ("=Blue", "blue", False),
    ],
)
def test_text_after_the_last_marker_is_compared(response, answer, correct):
    assert GRADERS["exact"](response, answer).correct is correct


def test_verdict_says_what_was_found_and_why():
    verdict = GRADERS["exact"]("=133", "132")
    assert (verdict.extracted, verdict.score) == ("133", None)
    assert verdict.reason == "expected '132'"
    assert GRADERS["exact"]("=0132", "132").reason == "equal to 132 as an integer"


@pytest.mark.parametrize(
    ("response", "reason"), [("132", "no '='"), ("", "no '='"), ("132= ", "nothing after")]
)
def test_response_without_an_answer_is_incorrect_with_a_reason(response, reason):
    verdict = GRADERS["exact"](response, "132")
    assert not verdict.correct
    assert verdict.extracted is None
    assert reason in verdict.reason


def test_marker_is_configurable():
    grade = exact_grader("Answer:")
    assert grade("so x=3. Answer: 4", "4").correct
    assert not grade("so x=4", "4").correct
    whole = exact_grader("")
    assert whole(" 132 ", "132").correct
    assert not whole("=132", "132").correct
    assert whole("  ", "132").reason == "the response is empty"


def test_integers_longer_than_python_parses_are_compared():
    """`int` refuses more than 4300 digits; a degenerate response has as many as fit."""
    nines = "9" * 5000
    assert not GRADERS["exact"]("=" + nines, "132").correct
    assert GRADERS["exact"]("=0" + nines, nines).correct
