"""`Sample`, the argument of reward functions, and its JSON form. Also detects whether a function is async or grades whole groups."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.rollouts import FinishReason, Prompt
from dapo_jax.text.thoughts import without_thoughts

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MARK = "whole_group"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The argument of a reward function: one response with its prompt and data row."""

    prompt: Prompt
    response: str
    """Text of the response, without special tokens."""
    tokens: Int[np.ndarray, " response"]
    """The sampled token ids, including the end token if there is one. The array is read-only in reward functions, because training uses it."""
    finish_reason: FinishReason
    step: int = 0
    """Number of completed training steps when the response began. 0 in evaluations."""

    @property
    def after_thoughts(self) -> str:
        """The response without its thoughts (`text.thoughts`), even if the prompt opened them. Empty if they do not end."""
        return without_thoughts(self.response, self.prompt.text).strip()

    @property
    def answer(self) -> str:
        """The reference answer."""
        return self.prompt.answer

    @property
    def response_tokens(self) -> int:
        """Number of tokens in the response, including the end token."""
        return len(self.tokens)


def handed_over(call: Sequence[Sample]) -> list[Sample]:
    """Returns copies of one call's samples, so that a function cannot modify the run's data. The samples must have the same prompt.

    The row is copied. Tokens become read-only views, so that long responses are not copied.
    """
    prompt = call[0].prompt
    prompt = replace(prompt, tokens=read_only(prompt.tokens), row=copied(dict(prompt.row)))
    return [replace(sample, prompt=prompt, tokens=read_only(sample.tokens)) for sample in call]


def read_only(tokens: np.ndarray) -> np.ndarray:
    """Returns a read-only view of an array."""
    view = np.asarray(tokens).view()
    view.flags.writeable = False
    return view


def copied(value: Any) -> Any:
    """Copies plain data recursively, and returns other objects unchanged."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {name: copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def whole_group(function: _Function) -> _Function:
    """Marks a reward function that grades all responses to one prompt in one call.

    The function is called with a list of `Sample` and must return a list with a bool, number or `Verdict` for each sample.
    """
    setattr(function, _MARK, True)
    return function


def is_whole_group(function: Callable[..., Any]) -> bool:
    """Returns whether the function, or the function inside a `functools.partial`, is marked with `whole_group`."""
    return getattr(function, _MARK, False) is True or getattr(_called(function), _MARK, False) is True


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether `function` is a coroutine function, an object with an async `__call__`, or a partial of either."""
    called = _called(function)
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)


def name_of(function: Callable[..., Any]) -> str:
    """Returns a function's name. For a `functools.partial`, returns the name of the wrapped function, and for other objects the name of their class."""
    called = _called(function)
    return getattr(called, "__qualname__", type(called).__qualname__)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def call_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Returns the samples of one call as JSON-serializable dicts. Raises TypeError if JSON cannot represent a value of a prompt's row."""
    return [
        {
            "ordinal": sample.prompt.ordinal,
            "prompt_token_ids": sample.prompt.tokens.tolist(),
            "prompt": sample.prompt.text,
            "answer": sample.prompt.answer,
            "row": plain_row(sample.prompt.row, instead="grade in this process with workers.count=0"),
            "response": sample.response,
            "response_token_ids": sample.tokens.tolist(),
            "finish_reason": sample.finish_reason,
            "spans": [[0, sample.step]],
        }
        for sample in samples
    ]


def sample_of(record: Mapping[str, Any]) -> Sample:
    """Converts a dict from `call_of` to a `Sample`. Also accepts a saved rollout, because it has the same fields."""
    prompt = Prompt(
        ordinal=record["ordinal"],
        tokens=np.array(record["prompt_token_ids"], np.int32),
        text=record["prompt"],
        answer=record["answer"],
        row=record["row"],
    )
    return Sample(
        prompt=prompt,
        response=record["response"],
        tokens=np.array(record["response_token_ids"], np.int32),
        finish_reason=record["finish_reason"],
        step=record.get("spans", [[0, 0]])[0][1],
    )


def plain_row(row: Mapping[str, Any], *, instead: str) -> dict[str, Any]:
    """Returns a data row with `plain` values. If JSON cannot represent a value, raises TypeError, which suggests the alternative `instead`."""
    values = {}
    for name, value in row.items():
        try:
            values[name] = plain(value)
        except TypeError as error:
            raise TypeError(
                f"the row's field {name!r} cannot be sent to a worker as JSON, because it contains {error}; remove it from the row, or {instead}"
            ) from error
    return values


def plain(value: Any) -> Any:
    """Converts NumPy values to Python values and tuples to lists, recursively. Raises TypeError if JSON cannot represent a value."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{value!r:.60} ({type(value).__name__})")
