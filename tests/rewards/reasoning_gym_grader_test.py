"""The grader of reasoning-gym tasks: the task's own scorer, with a near miss being a miss."""

import pyarrow
import pytest
from pyarrow import parquet

from dapo_jax.rewards import grade_function
from dapo_jax.rewards.graders import _restored
from dapo_jax.trackers.json_lines import read_lines, write_lines
from tests.rewards.samples import sample

GRADE = grade_function("reasoning_gym")
ENTRY = {"question": "How many?", "answer": "2", "metadata": {}}
ROW = {"task": "letter_counting", "options": {"min_words": 3}, "entry": ENTRY}


def graded(response, row=ROW):
    [verdict] = GRADE([sample(response, prompt="How many?", answer="2", row=row)])
    return verdict


@pytest.fixture
def installed():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym")


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("2", True),
        (" 2 \n", True),
        ("<think>3?</think>\n2", True),
        ("3", False),
        ("<think>2", False),
        ("", False),
        ("  ", False),
    ],
)
def test_the_trimmed_response_is_graded_by_the_task(installed, response, correct):
    assert graded(response).correct is correct


def test_an_answer_that_holds_the_right_one_scores_a_share_and_is_wrong(installed):
    """`12` holds `2`, for which the task gives 1/2."""
    verdict = graded("12")
    assert (verdict.correct, verdict.extracted) == (False, "12")
    assert verdict.reason == "letter_counting scores it 0.5"
    assert verdict.score is None  # the configured rewards apply, not the share


def test_answer_on_which_the_scorer_raises_is_wrong(installed):
    verdict = graded("2", {**ROW, "entry": {"question": "How many?"}})
    assert not verdict.correct
    assert verdict.reason.startswith("letter_counting cannot parse the answer: KeyError")


def test_rows_of_another_source_are_refused():
    with pytest.raises(RuntimeError, match=r"data\.source=reasoning_gym:TASK; .*\['answer'\]"):
        graded("2", {"answer": "2"})


def test_misspelt_name_is_answered_with_the_right_one():
    with pytest.raises(ValueError, match="did you mean 'reasoning_gym'"):
        grade_function("reasoning-gym")


def by_json(rows, file):
    write_lines(file, rows, what="rows")
    return read_lines(file, what="a row", needs="entry")


def by_parquet(rows, file):
    # Arrow cannot store some of the objects.
    parquet.write_table(pyarrow.Table.from_pylist(by_json(rows, file)), file)
    return parquet.read_table(file).to_pylist()


@pytest.mark.parametrize("stored", [by_json, by_parquet])
def test_stored_rows_score_like_the_rows_of_a_run(installed, stored, tmp_path):
    """Every task of the package. Each answer is graded with its own question and with the next one, where it is usually wrong.
    JSON and Arrow have lists, but no tuples."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    skipped, differ = [], []
    for task in DATASETS:
        more = {"task": task, "options": {}}  # not stored, because Arrow has no mapping without keys
        try:
            rows = [{"entry": entry} for entry in reasoning_gym.create_dataset(task, seed=1, size=2)]
            pairs = [*zip(rows, stored(rows, tmp_path / "rows"), strict=True)]
        except (AssertionError, pyarrow.ArrowException):  # it needs options, or Arrow has no mixed lists
            skipped.append(task)
            continue
        for answer in (str(row["entry"]["answer"]) for row in rows):
            reasons = [[graded(answer, row | more).reason for row in pair] for pair in pairs]
            differ += [task for of_run, of_stored in reasons if of_run != of_stored]
    assert differ == []
    assert set(skipped) <= {"composite", "codeio", "futoshiki", "knights_knaves"}


@pytest.mark.parametrize(
    ("value", "like", "restored"),
    [
        ([[1, 2], [3]], ((5,),), ((1, 2), (3,))),
        ([[1, 2]], [(5, 6), (7, 8)], [(1, 2)]),
        ([["a", [1]], ["b", [2, 3]]], [("c", [4])], [("a", [1]), ("b", [2, 3])]),
        ({"1": [2], "3": [4]}, {1: (0,)}, {1: (2,), 3: [4]}),
        ({"a": {"b": [1]}, "new": [2]}, {"a": {"b": (0,)}}, {"a": {"b": (1,)}, "new": [2]}),
        ([], (), ()),
        ([[1]], (), ([1],)),
        ([1], None, [1]),
        ("text", ("other",), "text"),
    ],
)
def test_a_stored_value_gets_the_tuples_and_keys_of_another_one(value, like, restored):
    assert _restored(value, like) == restored
    assert _restored(restored, like) == restored
