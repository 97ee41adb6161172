"""The grader `reasoning_gym`: a task's own `score_answer`, for rows of `data.source=reasoning_gym:TASK`."""

import importlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.sample import Sample

CORRECT_FROM = 0.99
"""The lowest score of a correct answer. Tasks give 0.01 for an answer in the right format, and a fraction for a near miss."""


def grade(sample: Sample) -> Verdict:
    """Grades the whole response, without surrounding white space: correct if its task scores it at least 0.99.

    An answer on which `score_answer` raises is wrong, since tasks parse the answer.

    Raises:
        ValueError: the row is not one of `reasoning_gym:TASK`.
    """
    row = sample.prompt.row
    if not {"task", "options", "entry"} <= set(row):
        raise ValueError(
            f"reward.grader=reasoning_gym needs rows of data.source=reasoning_gym:TASK; found a row of {sorted(row)}"
        )
    answer = sample.response.strip()
    if not answer:
        return Verdict(correct=False, reason="the response is empty")
    score_answer = _score_answer(row["task"], json.dumps(row["options"], sort_keys=True))
    try:
        score = float(score_answer(answer, row["entry"]))
    except Exception as error:
        return Verdict(
            correct=False,
            extracted=answer,
            reason=f"{row['task']} cannot read it: {type(error).__name__}: {error}",
        )
    return Verdict(
        correct=score >= CORRECT_FROM, extracted=answer, reason=f"{row['task']} scores it {score:.3g}"
    )


@cache
def _score_answer(task: str, options: str) -> Callable[[str, Mapping[str, Any]], float]:
    package = importlib.import_module("reasoning_gym")  # an extra, which made the rows
    return package.create_dataset(task, seed=0, size=1, **json.loads(options)).score_answer
