r"""The grader `math`: what a statement is, and when two of them mean the same."""

import threading

import pytest

from dapo_jax.rewards import GRADERS
from dapo_jax.rewards.math_grader import TAIL_CHARACTERS

grade = GRADERS["math"]

EQUAL = [
    ("Answer: 6/8", r"\frac{3}{4}"),
    ("Answer: 0.75", "3/4"),
    (r"Answer: $\frac68$", "0.75"),
    ("Answer: 2^{10}", "1024"),
    (r"Answer: \sqrt{8}", r"2\sqrt{2}"),
    ("Answer: 1,234", "1234"),
    (r"Answer: 80^\circ", "80"),
    ("Answer: x = 3", "3"),
    ("Answer: {2, 1}", r"\{1, 2\}"),
    ("Answer: The answer is 34.", "34"),
    ("**Answer:** 34", "34"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    ("So the answer is 34.", "34"),
    ("The final answer is $\\frac{6}{8}$.", "3/4"),
    ("34%", "34"),
    ("Answer: 2 - 0\nSo it is \\boxed{2}.", "2"),  # what is stated last
    ("Answer: 3\nSo it is \\boxed{34}.", "34"),
    ("7 + 1 = 8", "8"),
    (r"Answer: \(0 + 4 = 4\)", "4"),
    ("Answer: 2 + 3i", "3i + 2"),
    (r"Answer: 2\sqrt{3} + 1", r"1 + \sqrt{12}"),
    ("Answer: blue", r"\text{blue}"),
]
DIFFERENT = [
    ("Answer: 35", "34"),
    ("Answer: -34", "34"),
    ("Answer: 2^{10}", "2"),  # no number is picked out of a formula
    ("Answer: 2^{10}", "10"),
    (r"\boxed{\frac{1}{2}}", "2"),
    ("Answer: 33.999", "34"),
    ("Answer: 3\nNo: 34", "34"),  # what an Answer: says decides
    ("\\boxed{34}\nAnswer: 3", "34"),
    ("Answer: (1, 2)", "(2, 1)"),
    ("Answer: x + 1", "x - 1"),
    ("34, 35", "34"),
    ("Answer: $8 + 2$", "10"),  # the question again
    ("8 + 2", "10"),
    (
        "Answer: 1 +" + " " * 1900 + "x",
        "2",
    ),  # minutes, if the pattern tried every way to share out the spaces
    ("Here is the answer to the math problem: 8 + 2", "10"),
    ("Answer: (9*6)", "54"),
    (r"\boxed{3+0}", "3"),
    (r"Answer: \(7 \times 2\)", "14"),
    ("So in the end there are 34 of them.", "34"),  # a number that stands in the text
    ("The hens are meal staples for 20 chickens. The chickens have regular deliveries.", "20"),
    ("brothers decide on another brother saying 80 more,\nwhich is an excess", "80"),
    ("no idea", "34"),
    ("", "34"),
]


LISTS = [  # a comma between coordinates is no thousands separator, whatever sign follows it
    (r"\boxed{\left(15,-29\right)}", "(15,-29)"),
    (r"\boxed{(15,-29)}", r"\left(15,-29\right)"),
    (r"Answer: (3,-1)", r"\left( 3, -1 \right)"),
    (r"\boxed{\left(3, -1\right)}", "(3,-1)"),
    (r"\boxed{1,-2}", "1, -2"),
    (r"\boxed{-2,1}", "1,-2"),
    (r"\boxed{\left(0,-2,100\right)}", "(0,-2,100)"),
]


@pytest.mark.parametrize(("response", "answer"), LISTS)
def test_a_list_with_a_negative_integer_is_no_sum(response, answer):
    verdict = grade(response, answer)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize(
    ("response", "answer"), [("Answer: 12,345-5", "12340"), ("Answer: 1,234,567 + 1", "1234568")]
)
def test_a_sum_with_a_thousands_separator_is_still_to_be_worked_out(response, answer):
    assert grade(response, answer).reason.endswith("left to be worked out")


@pytest.mark.parametrize(("response", "answer"), EQUAL)
def test_equal_in_meaning(response, answer):
    verdict = grade(response, answer)
    assert verdict.correct, verdict.reason
    assert verdict.extracted


@pytest.mark.parametrize(("response", "answer"), DIFFERENT)
def test_different(response, answer):
    assert not grade(response, answer).correct


def test_the_reason_tells_text_from_meaning():
    assert grade("Answer: 34", "34").reason == "after the last 'Answer:': equal as text"
    assert grade("Answer: 34.0", "34").reason == "after the last 'Answer:': equal to '34' in meaning"
    assert grade("Answer: 8 + 2", "10").reason == "after the last 'Answer:': left to be worked out"
    nothing = "behind words such as 'the answer is': nothing that can be read as mathematics"
    assert grade("no idea", "34").reason == nothing


def test_what_is_stated_has_a_vote_even_if_it_is_no_mathematics():
    assert grade("Answer: blue sky", r"\text{red}").extracted == "bluesky"
    assert grade("no idea", "34").extracted is None


def test_only_the_end_of_a_response_is_looked_at():
    response = "Answer: 34\n"  # 11 characters; without the A of the first nothing is stated
    assert grade(response + " " * (TAIL_CHARACTERS - 11), "34").correct
    assert not grade(response + "and so on " * 200, "34").correct


def test_it_works_in_a_thread_where_no_signal_arrives():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(grade("Answer: 17/34", "0.5")))
    thread.start()
    thread.join()
    assert [verdict.correct for verdict in verdicts] == [True]


def test_a_reference_that_could_not_be_read_in_time_is_read_again(monkeypatch):
    from dapo_jax.rewards import math_grader

    with monkeypatch.context() as late:
        late.setattr(math_grader, "_parsed", lambda text: [])
        assert math_grader._gold("6/17") == ()
    assert math_grader._gold("6/17")
