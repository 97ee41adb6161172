r"""The graders `dapo` and `dapo_boxed` against the rule of DAPO's released code, case by case, worked out by hand.

Each case is (response, reference answer, expected normal form of what is found, is it correct). A normal form of None means that no answer is
found.
"""

import pytest

from dapo_jax.rewards import GRADERS
from dapo_jax.rewards.dapo_grader import BOX_CHARACTERS, TAIL_CHARACTERS, last_boxed

EXTRACTION = [
    ("So it is 34.\nAnswer: 34", "34", "34", True),
    ("answer: 34", "34", "34", True),  # any case
    ("ANSWER :\t34", "34", "34", True),  # white space before and after the colon
    ("Answer:\n\n34", "34", "34", True),  # \s crosses lines after the colon
    ("Answer: 3\nAnswer: 34", "34", "34", True),  # the last match counts
    ("Answer: 34\nAnswer: 3", "34", "3", False),
    ("Answer: 34\nWait, no.", "34", "34", True),  # up to the end of its line
    ("Answer: 34 because", "34", "34because", False),
    ("The final answer: 34", "34", "34", True),  # not only at the beginning of a line
    ("Answers: 34", "34", None, False),
    ("Answer", "34", None, False),
    ("Answer:", "34", None, False),
    ("Answer: ", "34", "", False),  # the space is all there is
    ("34", "34", None, False),
    ("Answer: Answer: 34", "34", "Answer:34", False),  # the first match takes the whole line
    (f"Answer: 34{' ' * (TAIL_CHARACTERS - 10)}", "34", "34", True),  # 10 characters and 290 of space
    (f"Answer: 34{' ' * (TAIL_CHARACTERS - 9)}", "34", None, False),  # its A is one too far from the end
    (f"Answer: 34\n{'x' * 400}", "34", None, False),
]
"""Which answer is found."""

NORMAL_FORM = [
    ("Answer: $34$", "34", "34", True),
    ("Answer: $34$.", "34", "34", True),  # what follows the second dollar sign is dropped
    ("Answer: The value is $34$", "34", "34", True),
    ("Answer: $34.$", "34", "34", True),  # .$ -> $
    ("Answer: 34.", "34", "34.", False),
    (r"Answer: \boxed{34}", "34", "34", True),
    ("Answer: x = 34", "34", "34", True),  # after the last =
    ("Answer: 34 = x", "34", "x", False),
    ("Answer: 1,234", "1234", "1234", True),
    ("Answer: 1,2,34", "1234", "1234", True),  # commas go from anything that is digits without them
    ("Answer: (1, 2)", "(1,2)", "(1,2)", True),  # spaces go
    ("Answer: -1,234", "-1234", "-1,234", False),  # a minus is no digit
    ("Answer: 34 dollars", "34", "34", True),
    (r"Answer: \$34", "34", "34", True),
    (r"Answer: 34^\circ", "34", "34", True),
    ("Answer: 34 square units", "34", "34", True),
    ("Answer: 34 apples", "34", "34apples", False),
    ("Answer: a 34", "34", "34", True),  # articles go
    (r"Answer: \text{yes}", "yes", "yes", True),
    (r"Answer: 34\text{ m}", "34", "34", True),  # space goes, \text{m} -> \text{} -> nothing
    (r"Answer: \overline{AB}", "AB", "AB", True),
    (r"Answer: \frac12", r"\frac{1}{2}", r"\frac{1}{2}", True),
    (r"Answer: \frac{1}{2}", r"\frac12", r"\frac{1}{2}", True),  # the reference is brought to the form too
    (r"Answer: \frac123", r"\frac{1}{2}3", r"\frac{1}{2}3", True),
    (r"Answer: \sqrt2", r"\sqrt{2}", r"\sqrt{2}", True),
    (r"Answer: \dfrac{1}{2}", r"\frac{1}{2}", r"\dfrac{1}{2}", False),
    (r"Answer: x\text{ and }y", "x,y", "x,y", True),
    (r"Answer: 1\text{ and }2", "12", "12", True),  # 1,2 is digits without its comma
    (r"Answer: 10{,}000", "10000", "10000", True),
    (r"Answer: 5\;6", "56", "56", True),
    (r"Answer: 4^{\mathrm{th}}", "4^{}", "4^{}", True),
    ('Answer: "34"', "34", "34", True),
    (r"Answer: x, y, \dots", "x,y,", "x,y,", True),
    ("Answer: 34", "$34$", "34", True),
    ("Answer: x=3", "y=3", "3", True),
    ("Answer: １２", "１２", "１２", True),  # noqa: RUF001 - full-width digits are only themselves
    ("Answer: always", "al", "al", True),  # "ways" goes from inside a word: as released
]
"""Normal forms that are compared."""

BOXED = [
    (r"So \boxed{34}.", "34", "34", True),
    (r"\boxed{1} then \boxed{34}", "34", "34", True),  # the last one
    (r"\boxed{\frac{1}{2}}", r"\frac12", r"\frac{1}{2}", True),  # braces inside
    (r"\boxed{34", "34", None, False),
    (r"\boxed{3} and \boxed{34", "3", None, False),  # the last one does not end
    (r"\fbox{34}", "34", None, False),
    (r"Answer: 3 \boxed{34}", "34", "334", False),  # an Answer: comes first, and its box is unwrapped
    ("Answer: 3\n" + r"\boxed{34}", "34", "3", False),  # ... and decides
    (r"\boxed{34}" + " " * (BOX_CHARACTERS - 10), "34", "34", True),  # 10 characters and 90 of space
    (r"\boxed{34}" + " " * (BOX_CHARACTERS - 9), "34", None, False),
]
"""Further cases of `dapo_boxed`."""

KNOWN_FALSE_NEGATIVES = [
    ("**Answer: 34**", "34"),
    (r"Answer: \(34\)", "34"),
    ("Answer: 34%", "34"),
    ("Answer: 34.0", "34"),
    ("Answer: 034", "34"),
    ("Answer: 6/8", "3/4"),
]
"""Right answers that the released rule calls wrong; `math` accepts them."""


@pytest.mark.parametrize(("response", "answer", "extracted", "correct"), [*EXTRACTION, *NORMAL_FORM])
@pytest.mark.parametrize("grader", ["dapo", "dapo_boxed"])
def test_both_graders_follow_the_released_rule(grader, response, answer, extracted, correct):
    verdict = GRADERS[grader](response, answer)
    assert (verdict.extracted, verdict.correct) == (extracted, correct)
    assert verdict.reason


@pytest.mark.parametrize(("response", "answer", "extracted", "correct"), BOXED)
def test_the_later_rule_falls_back_to_the_last_box(response, answer, extracted, correct):
    verdict = GRADERS["dapo_boxed"](response, answer)
    assert (verdict.extracted, verdict.correct) == (extracted, correct)


@pytest.mark.parametrize(("response", "answer"), KNOWN_FALSE_NEGATIVES)
def test_known_false_negatives_stay_wrong_here_and_are_right_in_meaning(response, answer):
    assert not GRADERS["dapo"](response, answer).correct
    assert not GRADERS["dapo_boxed"](response, answer).correct
    assert GRADERS["math"](response, answer).correct


def test_the_last_box_may_hold_boxes():
    assert last_boxed(r"\boxed{a \boxed{b} c}") == "b"
    assert last_boxed("") is None
