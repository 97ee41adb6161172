"""Messages between a grading pool and its workers, as JSON: a call is a list of samples, an answer a list of verdicts.

Each message is a line with the number of the call it belongs to, so that an answer is never taken for that to another call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dapo_jax.dapo.rollouts import Prompt, Verdict
from dapo_jax.rewards.sample import Sample

MAX_ANSWER_BYTES = 1 << 24
"""The most that a worker may answer one call with: verdicts on a group are some kilobytes."""


def call_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """All that a reward function may read; numpy values become Python's, tuples become lists.

    Raises:
        TypeError: a prompt's row holds what JSON has no name for.
    """
    return [_plain_sample(sample) for sample in samples]


def samples_of(call: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """The samples that `call_of` turned into JSON."""
    return [sample_of(part) for part in call]


def sample_of(part: Mapping[str, Any]) -> Sample:
    """One sample of a call, or the one that a saved rollout was made from: the names are the same."""
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


def answer_of(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Verdicts for the way back."""
    return {"verdicts": [asdict(verdict) for verdict in verdicts]}


def verdicts_of(answer: Mapping[str, Any]) -> list[Verdict]:
    """The verdicts that `answer_of` turned into JSON."""
    return [Verdict(**verdict) for verdict in answer["verdicts"]]


def _plain_sample(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    return {
        "ordinal": prompt.ordinal,
        "prompt_token_ids": prompt.tokens.tolist(),
        "prompt": prompt.text,
        "answer": prompt.answer,
        "row": plain_row(prompt.row, instead="grade in this process with reward.workers=0"),
        "response": sample.response,
        "response_token_ids": sample.tokens.tolist(),
        "finish_reason": sample.finish_reason,
    }


def plain_row(row: Mapping[str, Any], *, instead: str) -> dict[str, Any]:
    """A row of the data with numpy values as Python's and tuples as lists, for a worker.

    Args:
        row: as it was read.
        instead: what to do about a field that cannot be handed over, other than to leave it out.

    Raises:
        TypeError: a field holds what JSON has no name for.
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
    """Numpy values as Python's and tuples as lists, at any depth.

    Raises:
        TypeError: somewhere is what JSON has no name for; the message is its text and type.
        RecursionError: it is nested too deep, or in itself.
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
