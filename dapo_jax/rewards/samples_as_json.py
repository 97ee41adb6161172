"""Samples as JSON, for calls to worker processes and for saved rollouts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.rewards.sample import Sample


def call_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Returns all that a reward function may read. NumPy values become Python's, tuples become lists.

    Raises:
        TypeError: a prompt's row holds a value that JSON cannot represent.
    """
    return [
        {
            "ordinal": sample.prompt.ordinal,
            "prompt_token_ids": sample.prompt.tokens.tolist(),
            "prompt": sample.prompt.text,
            "answer": sample.prompt.answer,
            "row": plain_row(sample.prompt.row, instead="grade in this process with reward.workers=0"),
            "response": sample.response,
            "response_token_ids": sample.tokens.tolist(),
            "finish_reason": sample.finish_reason,
        }
        for sample in samples
    ]


def sample_of(part: Mapping[str, Any]) -> Sample:
    """Returns one sample of a call, or the sample of a saved rollout, which has the same names."""
    prompt = Prompt(
        ordinal=part["ordinal"],
        tokens=np.array(part["prompt_token_ids"], np.int32),
        text=part["prompt"],
        answer=part["answer"],
        row=part["row"],
    )
    return Sample(
        prompt=prompt,
        response=part["response"],
        tokens=np.array(part["response_token_ids"], np.int32),
        finish_reason=part["finish_reason"],
    )


def plain_row(row: Mapping[str, Any], *, instead: str) -> dict[str, Any]:
    """Returns a row of the data with NumPy values as Python's and tuples as lists.

    Args:
        row: the row as it was read.
        instead: a remedy for the error message, other than leaving the field out.

    Raises:
        TypeError: a field holds a value that JSON cannot represent.
    """
    found = {}
    for name, value in row.items():
        try:
            found[name] = plain(value)
        except TypeError as error:
            raise TypeError(
                f"the row's field {name!r} holds {error}, which JSON cannot hand to a worker; leave it out of the row, or {instead}"
            ) from error
    return found


def plain(value: Any) -> Any:
    """Returns NumPy values as Python's and tuples as lists, at any depth.

    Raises:
        TypeError: JSON cannot represent a value; the message is its text and type.
        RecursionError: the value is nested too deep, or contains itself.
    """
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{value!r:.60} ({type(value).__name__})")
