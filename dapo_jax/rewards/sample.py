"""The argument of every reward function, as JSON too, and how it is called: with one response or a group, awaited or not."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.rollouts import FinishReason, Prompt

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MARK = "whole_group"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The argument of a reward function: one response, its prompt, and the row of the data."""

    prompt: Prompt
    response: str
    """Text of the response, without special tokens."""
    tokens: Int[np.ndarray, " response"]
    """The sampled tokens, with the end token if there is one. Read-only for functions, since training uses the same array."""
    finish_reason: FinishReason

    @property
    def answer(self) -> str:
        """The reference answer."""
        return self.prompt.answer

    @property
    def response_tokens(self) -> int:
        """Number of tokens of the response, with the end token."""
        return len(self.tokens)


def handed_over(call: Sequence[Sample]) -> list[Sample]:
    """Returns the samples of one call, which have one prompt, for a function that can change neither the run's data nor another call's.

    Tokens are read-only views, so long responses are not copied. Rows are copies.
    """
    prompt = call[0].prompt
    row = {name: copied(value) for name, value in prompt.row.items()}
    own = replace(prompt, tokens=read_only(prompt.tokens), row=row)
    return [replace(sample, prompt=own, tokens=read_only(sample.tokens)) for sample in call]


def read_only(tokens: np.ndarray) -> np.ndarray:
    """Returns a read-only view."""
    view = np.asarray(tokens).view()
    view.flags.writeable = False
    return view


def copied(value: Any) -> Any:
    """Copies plain data at any depth; returns other objects as they are."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {name: copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def whole_group(function: _Function) -> _Function:
    """Marks a reward function that takes all responses to one prompt in one call.

    It is called with a list of `Sample` and returns a bool, number or `Verdict` for each, in the same order.
    """
    setattr(function, _MARK, True)
    return function


def is_whole_group(function: Callable[..., Any]) -> bool:
    """Returns whether `whole_group` marks the function, or the function that a partial calls."""
    return getattr(function, _MARK, False) is True or getattr(_called(function), _MARK, False) is True


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether this is a coroutine function, an object whose `__call__` is one, or a partial of either."""
    called = _called(function)
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of the function, of the function that a partial calls, or of an object's class."""
    called = _called(function)
    return getattr(called, "__qualname__", type(called).__qualname__)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


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

    Raises:
        TypeError: a field holds a value that JSON cannot represent. The remedy is to leave it out of the row, or `instead`.
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
