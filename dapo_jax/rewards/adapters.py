"""Runs reward functions written for other trainers, unchanged: `trl:PLACE:function` and `verl:PLACE:function`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dapo_jax.dapo.rollouts import Verdict, as_float
from dapo_jax.rewards.sample import Sample, is_async, whole_group

_Given = TypeVar("_Given")


def trl_reward(function: Callable[..., Any]) -> Callable[[Sequence[Sample]], Any]:
    """Adapts a TRL reward function, `(prompts, completions, **columns) -> list of numbers`, to grade a whole group.

    The function is called once per prompt, with all of the prompt's responses, so it can compare them. `columns` contains the
    row's other fields, and the responses' token ids as `completion_ids`. As in TRL, only columns that are parameters of the function
    are passed, unless it accepts `**kwargs`. If the row's prompt is a conversation, each response is passed as a conversation
    too: `[{"role": "assistant", "content": ...}]`.
    """

    def arguments(samples: Sequence[Sample]) -> dict[str, Any]:
        prompt = samples[0].prompt
        asked = prompt.row.get("prompt", prompt.text)
        responses: list[Any] = [sample.response for sample in samples]
        if not isinstance(asked, str):
            responses = [[{"role": "assistant", "content": text}] for text in responses]
        row = {"answer": prompt.answer, **prompt.row}
        columns = {name: [value] * len(samples) for name, value in row.items() if name != "prompt"}
        columns["completion_ids"] = [sample.tokens.tolist() for sample in samples]
        named = named_arguments(function, columns)
        return {"prompts": [asked] * len(samples), "completions": responses, **named}

    return whole_group(_adapted(function, arguments, lambda scores: scores))


def verl_reward(function: Callable[..., Any]) -> Callable[[Sample], Any]:
    """Adapts a verl reward function, `compute_score(data_source, solution_str, ground_truth, extra_info)`, to grade a `Sample`.

    The function returns a number, or a mapping with `score` and optionally `acc`, which is 1 for a correct answer and 0 otherwise.
    Without `acc`, a score above 0 counts as correct. Only arguments that are parameters of the function are passed. `data_source` and `extra_info` come from the row's fields of the same names.
    """

    def arguments(sample: Sample) -> dict[str, Any]:
        row = sample.prompt.row
        given = {
            "data_source": row.get("data_source", ""),
            "solution_str": sample.response,
            "ground_truth": sample.answer,
            "extra_info": row.get("extra_info"),
        }
        return named_arguments(function, given)

    def verdict(given: Any) -> Verdict:
        fields = given if isinstance(given, Mapping) else {"score": given}
        if "score" not in fields:
            raise ValueError(
                f"a verl reward function must return a number, or a mapping with 'score'; got {given!r:.200}"
            )
        score, extracted = as_float(fields["score"]), fields.get("pred")
        extracted = None if extracted is None else str(extracted)
        return Verdict(correct=fields.get("acc", score > 0), extracted=extracted, score=score)

    return _adapted(function, arguments, verdict)


ADAPTERS = {"trl": trl_reward, "verl": verl_reward}
"""Maps the prefix of a reward function's name, for example `trl` in `trl:rewards.py:brief`, to its adapter."""


def _adapted(
    function: Callable[..., Any],
    arguments: Callable[[_Given], Mapping[str, Any]],
    read: Callable[[Any], Any],
) -> Callable[[_Given], Any]:
    """Returns a function that calls `function(**arguments(given))` and converts the result with `read`. It is async if `function` is async."""
    if is_async(function):

        async def awaited(given: _Given) -> Any:
            return read(await function(**arguments(given)))

        return awaited
    return lambda given: read(function(**arguments(given)))


def named_arguments(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that match a function's parameter names, or all columns if the function accepts `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: values for name, values in columns.items() if name in parameters}
