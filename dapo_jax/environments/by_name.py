"""Environments by name: one that comes with the package, one of another library, `module:name`, or `path/to/file.py:name`."""

from collections.abc import Callable
from typing import Any

from dapo_jax.environments.adapters import ADAPTERS
from dapo_jax.environments.guess import GuessTheNumber
from dapo_jax.environments.protocol import Environment
from dapo_jax.nearest import nearest
from dapo_jax.rewards.functions import load_function, loading

ENVIRONMENTS = {"guess": GuessTheNumber}
"""The environments that come with the package, by name."""


def load_environment(source: str) -> Environment:
    """The environment that `environment.source` names.

    Raises:
        ValueError: there is none of that name, it cannot be loaded or made, or what it makes has no `episode`.
    """
    if ":" not in source and source not in ENVIRONMENTS:
        known = [*ENVIRONMENTS, *ADAPTERS]
        near = nearest(source, known)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {sorted(known)}."
        raise ValueError(
            f"no environment is named {source!r}; {hint} An own one is module:name or path/to/file.py:name, one of another library LIBRARY:NAME"
        )
    kind, _, rest = source.partition(":")
    if kind in ADAPTERS:
        return ADAPTERS[kind](rest)
    make = ENVIRONMENTS.get(source) or _loaded(source, kind)
    made = loading(source, "making the environment", make, remedy="; it is called without arguments")
    episode = loading(source, "its attribute `episode`", lambda: getattr(made, "episode", None))
    if not callable(episode):
        raise ValueError(
            f"{source}: a {type(made).__name__} has no method episode(row, seed), which makes the episode of a response"
        )
    try:
        getattr(made, "group_rewards", None)
    except Exception as error:  # of somebody else's property
        raise ValueError(
            f"{source}: its attribute `group_rewards` fails with {type(error).__name__}: {error}"
        ) from error
    return made


def _loaded(source: str, kind: str) -> Callable[[], Any]:
    try:
        return load_function(source)
    except ValueError as error:
        near = nearest(kind, ADAPTERS, least=0.7)
        raise ValueError(f"{error}; did you mean {near[0]}:...?" if near else str(error)) from error
