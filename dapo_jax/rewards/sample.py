"""The argument of every reward function, and how it is called: with one response or a whole group, and whether it is awaited."""

import inspect
from collections.abc import Callable, Sequence
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
    """Returns the samples of one call for a function, which can change neither the run's data nor another call's.

    Tokens are read-only views, so long responses are not copied. Rows are copies.
    """
    prompts = {id(sample.prompt): sample.prompt for sample in call}
    own = {
        key: replace(
            prompt,
            tokens=read_only(prompt.tokens),
            row={name: copied(value) for name, value in prompt.row.items()},
        )
        for key, prompt in prompts.items()
    }
    return [
        replace(sample, prompt=own[id(sample.prompt)], tokens=read_only(sample.tokens)) for sample in call
    ]


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
