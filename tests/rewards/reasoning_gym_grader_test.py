"""The grader of reasoning-gym tasks: the task's own scorer, with a near miss being a miss."""

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.rewards import Sample, grade_function

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
