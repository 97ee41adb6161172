"""Finds environments by name: in this package, in another library, as `module:name` or as `path/to/file.py:name`."""

from collections.abc import Callable
from typing import Any

from dapo_jax.environments.adapters import ADAPTERS
from dapo_jax.environments.guess import GuessTheNumber
from dapo_jax.environments.protocol import Environment
from dapo_jax.nearest import nearest
from dapo_jax.rewards.functions import load_function, loading

ENVIRONMENTS = {"guess": GuessTheNumber}
"""Environments of this package, by name."""


def load_environment(source: str) -> Environment:
    """Returns the environment that `environment.source` names.

    Raises:
        ValueError: the name is unknown, it cannot be loaded or made, or it has no method `episode`.
    """
    if ":" not in source and source not in ENVIRONMENTS:
        known = [*ENVIRONMENTS, *ADAPTERS]
        near = nearest(source, known)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {sorted(known)}."
        raise ValueError(
            f"no environment is named {source!r}; {hint} Your own is module:name or path/to/file.py:name, and another library's LIBRARY:NAME"
        )
    kind, _, rest = source.partition(":")
    if kind in ADAPTERS:
        return ADAPTERS[kind](rest)
    make = ENVIRONMENTS.get(source) or _loaded(source, kind)
    made = loading(source, "making the environment", make, remedy="; it is called without arguments")
    if not callable(getattr(made, "episode", None)):
        raise ValueError(
            f"{source}: a {type(made).__name__} has no method episode(row, seed), which makes the episode of a response"
        )
    return made


def _loaded(source: str, kind: str) -> Callable[[], Any]:
    try:
        return load_function(source)
    except ValueError as error:
        near = nearest(kind, ADAPTERS, least=0.7)
        raise ValueError(f"{error}; did you mean {near[0]}:...?" if near else str(error)) from error
