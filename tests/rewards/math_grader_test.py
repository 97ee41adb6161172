r"""The grader `math`: what a statement is, and when two of them mean the same."""

import random
import time

import pytest

from dapo_jax.rewards import GRADERS
from dapo_jax.rewards.math_grader import TAIL_CHARACTERS
from dapo_jax.rewards.numerals import PER_AREA, UNIT, placeholder
from tests.rewards import second_reader
from tests.rewards.math_pairs import DIFFERENT as DIFFERENT_STATEMENTS
from tests.rewards.math_pairs import DIFFERENT_RESPONSES, SAME, SAME_RESPONSES
from tests.rewards.words import ENGLISH_WORDS, NUMBER_WORDS

grade = GRADERS["math"]


@pytest.mark.parametrize(
    ("response", "answer"), [("Answer: 12,345-5", "12340"), ("Answer: 1,234,567 + 1", "1234568")]
)
def test_a_sum_with_a_thousands_separator_is_still_to_be_worked_out(response, answer):
    assert grade(response, answer).reason.endswith("unevaluated arithmetic")


def test_the_reason_tells_text_from_meaning():
    assert grade("Answer: 34", "34").reason == "after the last 'Answer:': equal as text"
    assert grade("Answer: 34.0", "34").reason == "after the last 'Answer:': equal to '34' in meaning"
    assert grade("Answer: 8 + 2", "10").reason == "after the last 'Answer:': unevaluated arithmetic"
    nothing = "after words such as 'the answer is': no answer found"
    assert grade("no idea", "34").reason == nothing


def test_what_is_stated_has_a_vote_even_if_it_is_no_mathematics():
    assert grade("Answer: blue sky", r"\text{red}").extracted == "bluesky"
    assert grade("no idea", "34").extracted is None


def test_only_the_end_of_a_response_is_looked_at():
    response = "Answer: 34\n"  # 11 characters; without the A of the first nothing is stated
    assert grade(response + " " * (TAIL_CHARACTERS - 11), "34").correct
    assert not grade(response + "and so on " * 200, "34").correct


def unlike(pairs, *, correct, written="{}"):
    """The pairs whose verdict is another one."""
    return [pair for pair in pairs if grade(written.format(pair[0]), pair[1]).correct != correct]


@pytest.mark.parametrize("written", ["Answer: {}", "So it is\n$\\boxed{{{}}}$."])
def test_a_statement_is_read_as_a_whole(written):
    boxable = [pair for pair in SAME if "$" not in pair[0] and r"\(" not in pair[0] and r"\[" not in pair[0]]
    assert not unlike(SAME if written.startswith("Answer") else boxable, correct=True, written=written)


def test_a_fragment_does_not_stand_for_the_whole():
    assert not unlike(DIFFERENT_STATEMENTS, correct=False, written="Answer: {}")


def test_the_last_statement_counts_and_one_that_is_cut_off_is_no_statement():
    assert not unlike(SAME_RESPONSES, correct=True)
    assert not unlike(DIFFERENT_RESPONSES, correct=False)


def test_a_decimal_stands_for_a_number_that_rounds_to_it_at_its_last_digit():
    """2/3 = 0.6666666...: at six digits and more the last one is rounded up, and one more or less is another number."""
    for places in range(1, 20):
        rounded = "0." + "6" * (places - 1) + "7"
        assert grade(f"Answer: {rounded}", "2/3").correct == (places >= 6), rounded
        assert grade("Answer: 2/3", rounded).correct == (places >= 6), rounded
        for other in ("0." + "6" * places, "0." + "6" * (places - 1) + "8"):
            assert not grade(f"Answer: {other}", "2/3").correct, other
    # The first 0.5, and all of 1/8: no decimal that is only near a number with an end is that number.
    assert grade("Answer: 0.500000", "1/2").correct
    assert not grade("Answer: 0.500001", "1/2").correct
    assert not grade("Answer: 0.1249999999", "1/8").correct


@pytest.mark.parametrize("power", [10, 98, 300, 1000])
def test_exact_numbers_are_compared_exactly_whatever_their_size(power):
    small = f"0.{'0' * power}1"
    for one, other in [
        (f"2^{{-{power}}}", f"2^{{-{power + 1}}}"),
        (f"10^{{{power}}}", f"10^{{{power}}}+1"),
        (small, small[:-1] + "2"),
        ("9" * power, "9" * (power - 1) + "8"),
        (rf"\sqrt{{2}} + 10^{{-{power}}}", r"\sqrt{2}"),
        (rf"x + 2^{{-{power}}}", rf"x + 2^{{-{power + 1}}}"),
        (f"(1, 2^{{-{power}}})", f"(1, 2^{{-{power + 1}}})"),
    ]:
        assert not unlike([(one, one), (other, other)], correct=True, written="Answer: {}")
        assert not unlike([(one, other), (other, one)], correct=False, written="Answer: {}")


def test_a_word_next_to_a_right_answer_leaves_it_right_only_if_the_word_is_on_the_list():
    assert len(ENGLISH_WORDS) == 3000
    right_answers = ["12", "$12$", "x = 12", r"\frac{24}{2}", r"\(12\)", "0"]
    for place, word in enumerate([*ENGLISH_WORDS, *NUMBER_WORDS]):
        right_answer = right_answers[place % 6]
        answer = "0" if right_answer == "0" else "12"
        known = placeholder(word) if placeholder(word) != PER_AREA else ""
        right = grade(f"Answer: {word} {right_answer}", answer).correct
        assert right == (known not in ("", UNIT)), word
        assert grade(f"Answer: {right_answer} {word}", answer).correct == bool(known), word


def test_no_word_that_changes_a_number_is_on_the_list():
    assert [word for word in NUMBER_WORDS if placeholder(word) not in ("", PER_AREA)] == [
        "times"
    ]  # as in "5 times"


NUMBERS = ["{a}", "-{a}", "{a}.{b}", "{a}/{c}", r"\frac{{{a}}}{{{c}}}", "{a} {b}/{c}", r"{a}\frac{{{b}}}{{{c}}}", "{a}e{b}", "{a}{b}%",
           r"{a}\times 10^{{{b}}}", r"0.\overline{{{a}}}", "{a}_{b}", "{a},{c}00", r"\${a}.{b}", r"{a}^{{{b}}}", "({a},{c})", "{a}!"]  # fmt: skip


def test_of_changed_references_only_those_are_right_that_a_second_reader_calls_equal():
    """A character of a number is replaced, left out or inserted. What both call equal are spaces, zeros, marks around it, and units."""
    generator = random.Random(0)
    right = 0
    for _ in range(800):
        b, c = generator.sample(range(1, 10), 2)
        answer = generator.choice(NUMBERS).format(a=generator.randrange(1, 400), b=min(b, c), c=max(b, c))
        place, new = generator.randrange(len(answer)), generator.choice([*"0123456789.,/+-^_!%e{}()", ""])
        changed = answer[:place] + new + answer[place + generator.randrange(2) :]
        if changed.strip() and grade(f"Answer: {changed}", answer).correct:
            right += 1
            assert second_reader.same_number(changed, answer), (changed, answer)
    assert right > 20  # where nothing changed but a zero, a space or a mark


def test_hostile_mathematics_is_refused_or_quick():
    grade("Answer: x", "y")  # sympy is loaded
    for text in (
        *("9^{9^{9^9}}", "10^{10^{10}}", "((2^{9999})^{9999})^{9999}", "1000!!", "(1000!)!", "x^{99999}", "(x+y+z+w)^{50}", "e^{e^{10^{4000}}}"),
        *("(" * 900 + "1" + ")" * 900, "1e9999", "1" + "+1" * 900, "\\frac{1" * 250, "\\boxed{" * 250, "**" * 900, "1 000 " * 300, "#" * 900, "2^{(100n)!}", "(10^{4000}n)!"),
        # At the points of the comparison, (230 + 7) / 3 = 79, so 3^m is an integer, and (41/13)^100 = 10^49: 2 to such powers does not fit in memory.
        *("2^{n3^m} + ij", r"2^{n^{100}}+\sqrt{n-2}", "2^{(10n)^{30}}", "x = 2^{(10n)^{30}}"),
    ):  # fmt: skip
        for response, answer in ((f"Answer: {text}", "34"), ("Answer: x+1", text)):
            start = time.process_time()
            assert not grade(response, answer).correct
            assert time.process_time() - start < 2, text


@pytest.mark.parametrize(
    ("response", "stated"),
    [
        ("Answer: 7? No.</think>\nSo it is \\boxed{8}.", "8"),  # the chat template opened the thoughts
        ("So \\boxed{8}.</think>\nAnswer: 7", "7"),
        ("<think>Answer: 7</think>8", "8"),
        ("<think>Answer: 7</think>Answer: 8<think>Answer: 9", "8"),
        ("[THINK]\\boxed{7}[/THINK]The answer is 8.", "8"),
        ("<think>" + "7, " * 1000 + "</think>The answer is 8.", "8"),
        ("<think>\\boxed{7}", None),  # cut off
        ("\\boxed{7}</think>", None),
        ("<think>Answer: 7</think>", None),
    ],
)
def test_thoughts_are_not_the_answer(response, stated):
    verdicts = {wanted: grade(response, wanted).correct for wanted in ("7", "8", "9")}
    assert verdicts == {wanted: wanted == stated for wanted in verdicts}
    assert grade(response, "8").extracted == stated
