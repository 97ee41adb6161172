"""Every reference answer of the published datasets, written as a response in its own form, is correct.

Only where DAPO_JAX_DATA names a folder with the folders dapo_math_17k, aime_2024, gsm8k and math_500.
"""

import os
import re

import pytest

from dapo_jax.data import load_rows
from dapo_jax.rewards import GRADERS
from dapo_jax.rewards.graders import UNREAD_BY

DATA = os.environ.get("DAPO_JAX_DATA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA, reason="DAPO_JAX_DATA names no folder with the four published datasets"),
]

STATED = "So it is.\nAnswer: {}".format
BOXED = r"So it is $\boxed{{{}}}$.".format


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    prepared = tmp_path_factory.mktemp("datasets")

    def of(source, split):
        return load_rows(source, split, prepared, path=f"{DATA}/{source}")

    return of


@pytest.mark.parametrize(
    ("source", "split"), [("dapo_math_17k", "train"), ("aime_2024", "test"), ("math_500", "test")]
)
@pytest.mark.parametrize(
    ("grader", "written"),
    [("dapo", STATED), ("dapo_boxed", STATED), ("dapo_boxed", BOXED), ("math", STATED), ("math", BOXED)],
    ids=["dapo", "dapo_boxed", "dapo_boxed in a box", "math", "math in a box"],
)
def test_a_stated_or_boxed_answer_is_correct(rows, source, split, grader, written):
    grade = GRADERS[grader]
    wrong = [
        row["answer"]
        for row in rows(source, split)
        if not grade(written(row["answer"]), row["answer"]).correct
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "split"), [("dapo_math_17k", "train"), ("aime_2024", "test"), ("math_500", "test")]
)
def test_references_that_are_not_read_as_a_whole_are_bases_and_words(rows, source, split):
    unread = [row["answer"] for row in rows(source, split) if UNREAD_BY["math"](row["answer"])]
    assert all(re.fullmatch(r"\d+_\{?\d\}?|\\text\{.*\}", answer) for answer in unread)


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8ks_worked_answers_are_correct(rows, split):
    wrong = [
        row["source_row"]
        for row in rows("gsm8k", split)
        if not GRADERS["gsm8k"](row["response"], row["answer"]).correct
    ]
    assert not wrong
