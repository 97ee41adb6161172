"""Questions of the package reasoning-gym: reproducible, in one split only, and the errors."""

import sys

import pytest

from dapo_jax.data import load_rows
from dapo_jax.data.sources import reasoning_gym_rows

FEW = {"min_words": 3, "max_words": 5, "train_questions": 60, "test_questions": 20}


@pytest.fixture
def installed():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym")


def texts(split, **options):
    return [row["prompt"] for row in reasoning_gym_rows("letter_counting", split, {**FEW, **options})]


def test_the_same_options_give_the_same_questions_and_another_seed_others(installed):
    assert texts("train") == texts("train")
    assert texts("train[:7]") == texts("train")[:7]
    assert not set(texts("train", seed=10_000)) & set(texts("train"))


def test_splits_share_no_question_and_have_the_given_sizes(installed):
    assert (len(set(texts("train"))), len(set(texts("test")))) == (60, 20)
    assert not set(texts("train")) & set(texts("test"))


def test_a_task_that_repeats_itself_has_no_question_twice_or_in_both_splits(installed):
    """Sums of two one-digit numbers without 0: 9 x 9 = 81 questions, of which 20 are held out."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "train_questions": 4000}
    train, test = (
        [row["prompt"] for row in reasoning_gym_rows("chain_sum", split, options | {"test_questions": 20})]
        for split in ("train", "test")
    )
    assert len(set(train)) == len(train)
    assert len(set(test)) == len(test) == 20
    assert not set(train) & set(test)


def test_options_reach_the_task(installed):
    lengths = {
        len(row["entry"]["metadata"]["span"]) for row in reasoning_gym_rows("letter_counting", "test", FEW)
    }
    assert lengths == {3, 4, 5}
    longer = reasoning_gym_rows("letter_counting", "test", {**FEW, "min_words": 7, "max_words": 7})
    assert {len(row["entry"]["metadata"]["span"]) for row in longer} == {7}


def test_rows_have_the_fields_that_the_grader_needs(installed, tmp_path):
    row = load_rows("reasoning_gym:letter_counting", "train", tmp_path, FEW)[0]
    assert row["task"] == "letter_counting"
    assert row["options"] == {"min_words": 3, "max_words": 5}
    assert row["entry"]["question"] == row["prompt"]
    assert row["entry"]["answer"] == row["answer"]
    assert list(tmp_path.iterdir()) == []  # generated, not stored


@pytest.mark.parametrize(
    ("task", "split", "options", "message"),
    [
        ("letter_countin", "train", {}, "no task 'letter_countin'; did you mean 'letter_counting'"),
        ("letter_counting", "dev", {}, r"no split 'dev'; the splits are train and test"),
        ("letter_counting", "train", {"min_word": 3}, "no option 'min_word'; did you mean 'min_words'"),
        ("letter_counting", "train", {"seed": -1}, "seed must be a whole number of at least 0; got -1"),
        ("letter_counting", "test[:21]", FEW, r"'test\[:21\]' needs 21 rows, but test has 20: .*\.test_questions"),
        ("letter_counting", "train", {"test_questions": 0}, "test_questions must be .* at least 1; got 0"),
        ("letter_counting", "train", {"min_words": 5, "max_words": 3}, "source_options=.*min_words.*AssertionError"),
    ],
)  # fmt: skip
def test_unknown_tasks_splits_and_options_are_refused(installed, task, split, options, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym_rows(task, split, options)


def test_a_test_split_that_takes_every_question_is_refused(installed):
    """81 sums of two one-digit numbers, so 1000 held-out ones leave none."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "test_questions": 1000}
    with pytest.raises(ValueError, match=r"lower data\.source_options\.test_questions"):
        reasoning_gym_rows("chain_sum", "train", options)


def test_missing_extra_is_answered_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[reasoning-gym\]'"):
        reasoning_gym_rows("letter_counting", "train", {})
