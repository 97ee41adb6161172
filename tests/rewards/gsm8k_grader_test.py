"""The grader `gsm8k`: numbers, after `####` or the last of the response."""

import pytest

from dapo_jax.rewards import GRADERS

grade = GRADERS["gsm8k"]


@pytest.mark.parametrize(
    ("response", "answer", "extracted", "correct"),
    [
        ("3 * 24 = 72\n#### 72", "72", "72", True),
        ("#### 72.0", "72", "72.0", True),
        ("#### $1,200", "1200", "1200", True),
        ("#### 1200", "1,200", "1200", True),
        ("#### -5", "-5", "-5", True),
        ("#### 5", "-5", "5", False),
        ("#### 7\n#### 72", "72", "72", True),  # the last mark
        ("#### 72 of 100", "72", "72", True),  # the first number behind it
        ("72 ####", "72", None, False),  # nothing behind it
        ("She has 72 clips.", "72", "72", True),  # no mark: the last number
        ("72, no: 73", "72", "73", False),
        ("10-3", "3", "3", True),  # a minus between numbers is no sign
        ("It costs $.50", "0.5", ".50", True),
        ("none", "72", None, False),
        ("", "72", None, False),
        ("#### 72", "48 + 24 = <<48+24=72>>72\n#### 72", "72", True),  # the dataset's own reference
        ("#### " + "9" * 5000, "9" * 5000, "9" * 5000, True),  # int() would refuse them
        ("#### ７", "7", None, False),  # noqa: RUF001 - full-width digits
    ],
)
def test_numbers(response, answer, extracted, correct):
    verdict = grade(response, answer)
    assert (verdict.extracted, verdict.correct) == (extracted, correct)


def test_a_reference_without_a_number_is_refused():
    with pytest.raises(ValueError, match="the grader gsm8k needs a reference with a number; got 'blue'"):
        grade("#### 7", "blue")
