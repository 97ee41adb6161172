"""Rewards as functions: what they are handed, what they may return, how they are found by name."""

import difflib
import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dapo_jax.rewards.adapters import ADAPTERS
from dapo_jax.rewards.graders import GRADERS, exact_grader
from dapo_jax.rewards.sample import Sample
from dapo_jax.rollouts import Verdict

RewardFunction = Callable[[Sample], Verdict | bool | float]
"""What a user writes."""
GradeFunction = Callable[[Sample], Verdict]
"""What `grade_group` calls."""

_NEEDS_A_ROW = {"reasoning_gym": "dapo_jax.rewards.reasoning_gym:grade"}
"""Graders by name that need more than the text and the answer; loaded when they are asked for."""


def grade_function(spec: str | RewardFunction, *, answer_marker: str = "=") -> GradeFunction:
    """The function that grades: from a name in `GRADERS`, from `module:function`, from a file, or as given.

    `trl:` or `verl:` before `module:function` or a file says for which trainer it was written, see `rewards.adapters`.

    Args:
        spec: the value of `reward.grader`, or a function of a `Sample`.
        answer_marker: for the grader `exact` only, see `exact_grader`.

    Raises:
        ValueError: the name is unknown or the function cannot be loaded. When grading: the function returned
            something that is no verdict.
        RuntimeError: when grading: the function raised; the message names the prompt.
    """
    if not isinstance(spec, str):
        return _checked(spec, getattr(spec, "__qualname__", repr(spec)))
    spec = _NEEDS_A_ROW.get(spec, spec)
    kind, _, place = spec.partition(":")
    if kind in ADAPTERS:
        return _checked(ADAPTERS[kind](load_function(place)), spec)
    if ":" in spec:
        return _checked(load_function(spec), spec)
    if spec not in GRADERS:
        names = [*GRADERS, *_NEEDS_A_ROW]
        near = difflib.get_close_matches(spec, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {sorted(names)}"
        raise ValueError(
            f"no grader is named {spec!r}; {hint} An own one is module:function or path/to/file.py:function"
        )
    grader = exact_grader(answer_marker) if spec == "exact" else GRADERS[spec]
    return lambda sample: grader(sample.response, sample.answer)


def _checked(function: RewardFunction, name: str) -> GradeFunction:
    def grade(sample: Sample) -> Verdict:
        try:
            result = function(sample)
        except Exception as error:
            raise RuntimeError(
                f"reward function {name} raised {type(error).__name__}: {error}; prompt {sample.prompt.ordinal} "
                f"({sample.prompt.text[:60]!r}), response {sample.response[:60]!r}"
            ) from error
        return as_verdict(result, name=name)

    return grade


def as_verdict(result: Any, *, name: str) -> Verdict:
    """What a reward function returned, as a verdict; numpy scalars count as Python's.

    A `Verdict` stays as it is. A bool says correct or not, and the configured rewards apply. A number is a
    score that becomes the reward as it is; it counts as correct if it is above 0.

    Raises:
        ValueError: NaN, an infinity, or anything else; `name` is the function that returned it.
    """
    if isinstance(result, Verdict):
        if result.score is not None and not math.isfinite(result.score):
            raise ValueError(
                f"reward function {name} returned a verdict with score {result.score}; scores are finite"
            )
        return result
    value = result.item() if isinstance(result, np.generic) else result
    if isinstance(value, bool):
        return Verdict(correct=value)
    if isinstance(value, int | float):
        score = float(value)
        if not math.isfinite(score):
            raise ValueError(f"reward function {name} returned {score}; a score must be a finite number")
        return Verdict(correct=score > 0, score=score)
    raise ValueError(
        f"reward function {name} returned {result!r} ({type(result).__name__}); it must return a bool, a finite "
        "number or a Verdict"
    )


def load_function(spec: str) -> Callable[..., Any]:
    """The function named by `module:function` or `path/to/file.py:function`.

    Raises:
        ValueError: no such file, module or function, or the name is not a function; or the module itself fails
            to import.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"{spec!r} names no function; write module:function or path/to/file.py:function")
    module = (
        _load_file(Path(place).expanduser(), spec) if place.endswith(".py") else _load_module(place, spec)
    )
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [known for known in vars(module) if known[0] != "_"], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{spec}: {place} has no {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{spec}: {name!r} is of type {type(function).__name__}, which cannot be called")
    return function


def _load_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(
            f"{spec}: cannot import the module {name!r}: {type(error).__name__}: {error}; a module must be on "
            "Python's path, a file is given as path/to/file.py:function"
        ) from error


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{spec}: there is no file {path} (looked from {Path.cwd()})")
    # The name is derived from the path: two files of one name stay two modules.
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    name = f"dapo_jax_file_{path.stem}_{digest}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses in the file look their module up while it runs
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{spec}: {path} fails to run: {type(error).__name__}: {error}") from error
    return module
