"""Reward functions written for other trainers, unchanged: `trl:PLACE:function` and `verl:PLACE:function`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.rewards.sample import Sample
from dapo_jax.rollouts import Verdict


def trl_reward(function: Callable[..., Any]) -> Callable[[Sample], float]:
    """A TRL reward function, `(prompts, completions, **columns) -> list of numbers`, as one of a `Sample`.

    It is called with lists of one element. `columns` are the fields of the row but its prompt, and `completion_ids`, the
    response's tokens; as in TRL, what the function does not name is left out unless it takes `**kwargs`. Where the row's
    prompt is a conversation, the response is one too: `[{"role": "assistant", "content": ...}]`.

    A function that compares the responses of a group with each other needs them all at once and is not for this.
    """

    def reward(sample: Sample) -> float:
        prompt = sample.prompt
        asked = prompt.row.get("prompt", prompt.text)
        conversation = not isinstance(asked, str)
        response = [{"role": "assistant", "content": sample.response}] if conversation else sample.response
        columns = {name: [value] for name, value in prompt.row.items() if name != "prompt"}
        columns = {"answer": [prompt.answer], **columns, "completion_ids": [sample.tokens.tolist()]}
        given = function(prompts=[asked], completions=[response], **_named(function, columns))
        if not isinstance(given, list | tuple) or len(given) != 1 or given[0] is None:
            raise ValueError(
                f"a TRL reward function returns one number for each completion; for one completion it returned {given!r}"
            )
        return given[0]

    return reward


def verl_reward(function: Callable[..., Any]) -> Callable[[Sample], Verdict]:
    """A verl reward function, `compute_score(data_source, solution_str, ground_truth, extra_info)`, as one of a `Sample`.

    It returns a number, or a mapping with `score` and perhaps `acc`, which says whether the answer is correct; without it
    a score above 0 is correct. `data_source` and `extra_info` are the row's fields of these names, if it has them.
    """

    def reward(sample: Sample) -> Verdict:
        row = sample.prompt.row
        given = function(
            data_source=row.get("data_source", ""),
            solution_str=sample.response,
            ground_truth=sample.answer,
            extra_info=row.get("extra_info"),
        )
        fields = given if isinstance(given, Mapping) else {"score": given}
        if "score" not in fields:
            raise ValueError(
                f"a verl reward function returns a number, or a mapping with 'score'; got {given!r}"
            )
        score = float(fields["score"])
        extracted = fields.get("pred")
        return Verdict(
            correct=bool(fields.get("acc", score > 0)),
            extracted=None if extracted is None else str(extracted),
            score=score,
        )

    return reward


ADAPTERS: dict[str, Callable[[Callable[..., Any]], Callable[[Sample], Any]]] = {
    "trl": trl_reward,
    "verl": verl_reward,
}
"""What stands before the first colon of a function's name -> how it is called."""


def _named(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: values for name, values in columns.items() if name in parameters}
