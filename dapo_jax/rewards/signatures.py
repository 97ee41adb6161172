"""How a reward function is called: with one response or a whole group, and whether it is awaited."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MARK = "whole_group"


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
