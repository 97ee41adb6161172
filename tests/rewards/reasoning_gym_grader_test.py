"""The grader of reasoning-gym tasks: the task's own scorer, with a near miss being a miss."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.rewards import Sample, grade_function
from dapo_jax.rewards.graders import _restored
from dapo_jax.trackers.json_lines import read_lines, write_lines

GRADE = grade_function("reasoning_gym")
ENTRY = {"question": "How many?", "answer": "2", "metadata": {}}
ROW = {"task": "letter_counting", "options": {"min_words": 3}, "entry": ENTRY}


def graded(response, row=ROW):
    prompt = Prompt(ordinal=7, tokens=np.array([5], np.int32), text="How many?", answer="2", row=row)
    tokens = np.array([4], np.int32)
    [verdict] = GRADE([Sample(prompt=prompt, response=response, tokens=tokens, finish_reason="stop")])
    return verdict


@pytest.fixture
def installed():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym")


@pytest.mark.parametrize(
    ("response", "correct"), [("2", True), (" 2 \n", True), ("3", False), ("", False), ("  ", False)]
)
def test_the_trimmed_response_is_graded_by_the_task(installed, response, correct):
    assert graded(response).correct is correct


def test_an_answer_that_holds_the_right_one_scores_a_share_and_is_wrong(installed):
    """`12` holds `2`, for which the task gives 1/2."""
    verdict = graded("12")
    assert not verdict.correct
    assert verdict.reason == "letter_counting scores it 0.5"
    assert verdict.extracted == "12"
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


@pytest.fixture(params=["json", "parquet"])
def stored(request, tmp_path):
    """A function that writes rows to a file and reads them again. JSON and Arrow have lists, but no tuples."""

    def by_json(rows):
        write_lines(tmp_path / "rows.jsonl", rows, what="rows")
        return read_lines(tmp_path / "rows.jsonl", what="a row", needs="entry")

    def by_parquet(rows):
        # Arrow cannot store some of the objects, nor a mapping without keys, such as `options`.
        entries = [{"entry": row["entry"]} for row in by_json(rows)]
        parquet.write_table(pyarrow.Table.from_pylist(entries), tmp_path / "rows.parquet")
        found = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
        return [row | read for row, read in zip(rows, found, strict=True)]

    return by_json if request.param == "json" else by_parquet


def test_stored_rows_score_like_the_rows_of_a_run(installed, stored):
    """Every task of the package. Each answer is graded with its own question and with the next one, where it is usually wrong."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    skipped, differ = [], []
    for task in DATASETS:
        try:
            dataset = reasoning_gym.create_dataset(task, seed=1, size=2)
            rows = [{"task": task, "options": {}, "entry": dataset[place]} for place in range(2)]
            found = stored(rows)
        except (AssertionError, pyarrow.ArrowException):  # it needs options, or Arrow has no mixed lists
            skipped.append(task)
            continue
        for answer in (str(row["entry"]["answer"]) for row in rows):
            verdicts = [[graded(answer, row).reason for row in each] for each in (rows, found)]
            differ += [task] * (verdicts[0] != verdicts[1])
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
