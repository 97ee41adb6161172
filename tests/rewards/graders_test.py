"""The exact grader: what counts as the answer, and what counts as equal. Also the grader of the package Math-Verify."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from dapo_jax.rewards import TEXT_RULES, grade_function, graders
from dapo_jax.rewards.graders import GRADERS, exact_grader
from dapo_jax.rewards.grading_pool import GradingPool
from tests.rewards.samples import samples


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


@pytest.mark.parametrize(
    ("response", "extracted", "reason"),
    [
        ("=133", "133", "expected '132'"),
        ("132", None, "no '=' in the response"),
        ("", None, "no '=' in the response"),
        ("132= ", None, "nothing after the last '='"),
    ],
)
def test_a_wrong_response_has_a_reason_and_an_answer_if_it_states_one(response, extracted, reason):
    verdict = GRADERS["exact"](response, "132")
    assert (verdict.correct, verdict.score) == (False, None)
    assert (verdict.extracted, verdict.reason) == (extracted, reason)


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


@pytest.fixture
def math_verify():
    pytest.importorskip("math_verify", reason="the extra math-verify")


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("So it is $\\boxed{\\frac{2}{4}}$.", "0.5", True),
        ("The answer is 12", "12", True),
        ("<think>\\boxed{7}</think>\\boxed{8}", "8", False),  # it reads the list 7, 8
        ("\\boxed{8+2}", "10", True),  # `math` does not evaluate it
        ("\\boxed{3}", "4", False),
        ("no idea", "4", False),
        ("", "4", False),
        ("\\boxed{4}", "", False),
    ],
)
def test_math_verify_judges_as_the_package_does(math_verify, response, answer, correct):
    """The verdicts of `verify(parse(reference in a box), parse(response))` of Math-Verify 0.9.0."""
    assert GRADERS["math_verify"](response, answer).correct is correct


def test_math_verify_runs_in_a_thread_and_its_limit_is_the_runs(math_verify):
    """The package's own limits need the main thread. The power has 370 million digits."""
    with ThreadPoolExecutor() as threads:
        assert threads.submit(GRADERS["math_verify"], "\\boxed{9}", "9").result().correct
    with closing(GradingPool("math_verify", workers=1, timeout_s=3.0, memory_mb=2048)) as pool:
        hangs, right = pool.grade(samples("\\boxed{9^{9^{9^9}}}", "\\boxed{9}", answer="9"))
    assert (hangs.lost, hangs.correct, right.correct) == ("timeout", False, True)


def test_a_grader_without_its_package_is_refused_before_it_grades(monkeypatch):
    graders.math_verify.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)  # Python then raises ImportError
    with pytest.raises(ValueError, match=r"math-verify.*\[math-verify\]"):
        grade_function("math_verify")
    assert "math_verify" not in TEXT_RULES
