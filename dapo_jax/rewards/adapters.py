"""Runs reward functions written for other trainers, unchanged: `trl:PLACE:function` and `verl:PLACE:function`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any, TypeVar

from dapo_jax.dapo.rollouts import Verdict, as_float
from dapo_jax.rewards.sample import Sample, is_async, whole_group

_Argument = TypeVar("_Argument")
_Call = tuple[Mapping[str, Any], Callable[[Any], Any]]
"""The arguments of a function, and a function that converts its result."""

NOT_APPLICABLE = "no reward function applies to this response"
"""Reason of the verdict on a response for which a TRL function returned None. Its reward in a sum is 0."""


def trl_reward(function: Callable[..., Any]) -> Callable[[Sequence[Sample]], Any]:
    """Adapts a TRL reward function, `(prompts, completions, **columns) -> list of numbers`, to grade a whole group.

    The function is called once per prompt, with all of the prompt's responses, so it can compare them. `columns` contains the row's other fields, the token
    ids `completion_ids`, `trainer_state` with the field `global_step` (`Sample.step`), `log_metric`, which logs `reward/parts/NAME`, and `log_extra`, which adds
    to the verdicts' reasons. As in TRL, only parameters of the function are passed, unless it accepts `**kwargs`. If the row's prompt is a conversation, each
    response is one too: `[{"role": "assistant", "content": ...}]`. The function returns None for a response to which it does not apply.
    """

    def call(samples: Sequence[Sample]) -> _Call:
        prompt = samples[0].prompt
        question = prompt.row.get("prompt", prompt.text)
        responses: list[Any] = [sample.response for sample in samples]
        if not isinstance(question, str):
            responses = [[{"role": "assistant", "content": text}] for text in responses]
        row = {"answer": prompt.answer, **prompt.row}
        columns = {name: [value] * len(samples) for name, value in row.items() if name != "prompt"}
        metrics: dict[str, list[float]] = {}
        extras: dict[str, Sequence[Any]] = {}
        columns |= {
            "prompts": [question] * len(samples),
            "completions": responses,
            "completion_ids": [sample.tokens.tolist() for sample in samples],
            "trainer_state": SimpleNamespace(global_step=samples[0].step),
            "log_metric": lambda name, value: metrics.setdefault(name, []).append(float(value)),
            "log_extra": lambda name, values: extras.update({name: values}),
        }

        def read(scores: Any) -> Any:
            scores = scores.tolist() if getattr(scores, "ndim", None) == 1 else scores
            if not isinstance(scores, list | tuple) or len(scores) != len(samples):
                return scores  # the caller reports it
            try:
                values = [as_float(score or 0.0) for score in scores]
            except (TypeError, ValueError):
                return scores  # the caller reports it
            parts = {name: fmean(logged) for name, logged in metrics.items()}
            verdicts = []
            for index, (score, value) in enumerate(zip(scores, values, strict=True)):
                extra = ", ".join(f"{name}={logged[index]!s:.500}" for name, logged in extras.items())
                reason = NOT_APPLICABLE if score is None else extra
                verdicts.append(Verdict(correct=value > 0, score=score, reason=reason, parts=parts))
            return verdicts

        return named_arguments(function, columns), read

    return whole_group(_adapted(function, call))


def verl_reward(function: Callable[..., Any]) -> Callable[[Sample], Any]:
    """Adapts a verl reward function, `compute_score(data_source, solution_str, ground_truth, extra_info)`, to grade a `Sample`.

    The function returns a number, or a mapping with `score` and optionally `acc`, which is 1 for a correct answer and 0 otherwise.
    Without `acc`, a score above 0 counts as correct. Only arguments that are parameters of the function are passed. `data_source` and `extra_info` come from the row's fields of the same names.
    """

    def call(sample: Sample) -> _Call:
        row = sample.prompt.row
        arguments = {
            "data_source": row.get("data_source", ""),
            "solution_str": sample.response,
            "ground_truth": sample.answer,
            "extra_info": row.get("extra_info"),
        }
        return named_arguments(function, arguments), verdict

    def verdict(result: Any) -> Verdict:
        fields = result if isinstance(result, Mapping) else {"score": result}
        if "score" not in fields:
            raise ValueError(
                f"a verl reward function must return a number, or a mapping with 'score'; got {result!r:.200}"
            )
        score, extracted = as_float(fields["score"]), fields.get("pred")
        extracted = None if extracted is None else str(extracted)
        return Verdict(correct=fields.get("acc", score > 0), extracted=extracted, score=score)

    return _adapted(function, call)


ADAPTERS = {"trl": trl_reward, "verl": verl_reward}
"""Maps the prefix of a reward function's name, for example `trl` in `trl:rewards.py:brief`, to its adapter."""


def _adapted(function: Callable[..., Any], call: Callable[[_Argument], _Call]) -> Callable[[_Argument], Any]:
    """Returns a function that calls `function` with the arguments from `call` and converts the result. It is async if `function` is async."""

    async def awaited(argument: _Argument) -> Any:
        arguments, read = call(argument)
        return read(await function(**arguments))

    def called(argument: _Argument) -> Any:
        arguments, read = call(argument)
        return read(function(**arguments))

    return awaited if is_async(function) else called


def named_arguments(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that match a function's parameter names, or all columns if the function accepts `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: values for name, values in columns.items() if name in parameters}
