"""The one-digit questions: complete, right, and in disjoint splits."""

from collections import Counter

from dapo_jax.data.builders.one_digit_arithmetic import questions, split_questions


def test_there_are_100_sums_55_differences_and_100_products():
    """10 x 10 ordered pairs; differences need left >= right: 10 + 9 + ... + 1 = 55."""
    assert Counter(question["operation"] for question in questions()) == {"+": 100, "-": 55, "*": 100}
    assert len({question["prompt"] for question in questions()}) == 255


def test_answers_are_right_and_never_negative():
    for question in questions():
        assert int(question["answer"]) == eval(question["prompt"]) >= 0


def test_splits_are_disjoint_and_together_all_questions():
    splits = split_questions()
    assert {name: len(found) for name, found in splits.items()} == {"train": 155, "test": 100}
    found = [question for split in splits.values() for question in split]
    assert sorted(found, key=str) == sorted(questions(), key=str)
