"""What goes to a grading worker and comes back, as JSON: a call is a sample, an answer is a verdict."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from dapo_jax.rewards.sample import Sample
from dapo_jax.rollouts import Prompt, Verdict


def call_of(sample: Sample) -> dict[str, Any]:
    """All that a reward function may read; numpy values become Python's, tuples become lists.

    Raises:
        TypeError: the prompt's row holds what JSON has no name for.
    """
    prompt = sample.prompt
    return {
        "ordinal": prompt.ordinal,
        "prompt_token_ids": prompt.tokens.tolist(),
        "prompt": prompt.text,
        "answer": prompt.answer,
        "row": {name: _plain(value, name) for name, value in prompt.row.items()},
        "response": sample.response,
        "response_token_ids": sample.tokens.tolist(),
        "finish_reason": sample.finish_reason,
    }


def sample_of(call: Mapping[str, Any]) -> Sample:
    """The sample that `call_of` turned into JSON, or that a saved rollout was made from: the names are the same."""
    prompt = Prompt(
        ordinal=call["ordinal"],
        tokens=np.array(call["prompt_token_ids"], np.int32),
        text=call["prompt"],
        answer=call["answer"],
        row=call["row"],
    )
    return Sample(
        prompt=prompt,
        response=call["response"],
        tokens=np.array(call["response_token_ids"], np.int32),
        finish_reason=call["finish_reason"],
    )


def answer_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict for the way back."""
    return {"verdict": asdict(verdict)}


def verdict_of(answer: dict[str, Any]) -> Verdict:
    """The verdict that `answer_of` turned into JSON."""
    return Verdict(**answer["verdict"])


def _plain(value: Any, name: str) -> Any:
    """Numpy values as Python's, at any depth."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), name)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(
        f"the row's field {name!r} holds {value!r:.60} ({type(value).__name__}), which JSON cannot hand to a grading worker; leave it out of "
        "the row, or grade in this process with reward.workers=0"
    )
