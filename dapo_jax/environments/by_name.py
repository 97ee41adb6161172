"""Loads environments by name. A name refers to this package, to another library, to `module:name` or to `path/to/file.py:name`.

This package contains one environment, `guess`. The policy guesses a hidden number, and the environment replies `>` or `<`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.environments.adapters.openenv import OpenEnvironment
from dapo_jax.environments.adapters.skyrl_gym import SkyRLEnvironment
from dapo_jax.environments.adapters.tinker import TinkerEnvironment
from dapo_jax.environments.adapters.trl import TrlEnvironment
from dapo_jax.environments.protocol import Environment, Step, Turn
from dapo_jax.hints import did_you_mean, nearest, needing
from dapo_jax.rewards.functions import load_function, loading


class GuessTheNumber:
    """A guessing game. The number to guess is the row's `answer`, from 0 to 99. A turn is a guess such as `31`. The reply `>` means "higher"."""

    def episode(self, row: Mapping[str, Any], seed: int) -> "GuessEpisode":
        """Creates the episode for a response. Raises ValueError if the answer is not a number from 0 to 99."""
        if not 0 <= (number := int(row["answer"])) <= 99:
            raise ValueError(f"the answer is {number}, but it must be a number from 0 to 99")
        return GuessEpisode(number)


class GuessEpisode:
    """An episode of the guessing game."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def step(self, turn: Turn) -> Step:
        """Ends the episode with reward 1 for the correct number, or with reward 0 if the turn is not a number."""
        malformed = not re.fullmatch(r"[0-9]{1,2}", turn.text) or turn.finish_reason == "length"
        metrics = {"guesses": turn.number + 1.0, "malformed": float(malformed)}
        if malformed:
            return Step(done=True, correct=False, metrics=metrics)
        if (guess := int(turn.text)) == self._number:
            return Step(reward=1.0, done=True, correct=True, metrics=metrics)
        return Step(append=">" if guess < self._number else "<", correct=False, metrics=metrics)


ENVIRONMENTS = {"guess": GuessTheNumber}
"""The environments in this package, by name."""

ADAPTERS: dict[str, Callable[[str], Any]] = {
    "trl": TrlEnvironment,
    "skyrl_gym": SkyRLEnvironment,
    "openenv": OpenEnvironment,
    "tinker": TinkerEnvironment,
}
"""Maps a prefix of `environment.source` to an environment class. The class is instantiated with the text after the first colon."""


AGENTS = ("agent", "command", "verifiers")
"""Prefixes of sources that are agents: programs that request answers from the policy, and own their loop. Their module is imported only for them."""


def load_environment(source: str, **options: Any) -> Environment:
    """Creates the environment from its name, the value of `environment.source`. `options` are arguments of `AgentEnvironment`. Raises ValueError if there is no
    such environment."""
    if ":" not in source and source not in ENVIRONMENTS:
        raise ValueError(
            f"no environment is named {source!r} ({did_you_mean(source, [*ENVIRONMENTS, *ADAPTERS, *AGENTS])}). Other forms are module:name, path/to/file.py:name "
            "and LIBRARY:NAME"
        )
    kind, _, rest = source.partition(":")
    if kind in ADAPTERS:
        return ADAPTERS[kind](rest)
    if kind in AGENTS:
        with needing("http", "the server of agents needs aiohttp and msgspec"):
            from dapo_jax.environments.adapters.verifiers import VerifiersEnvironment
            from dapo_jax.environments.agents.environment import AgentEnvironment
        agents = VerifiersEnvironment if kind == "verifiers" else AgentEnvironment
        return agents(kind, rest, **options)
    try:
        make = ENVIRONMENTS.get(source) or load_function(source)
    except ValueError as error:
        similar = nearest(kind, [*ADAPTERS, *AGENTS], least=0.7)
        raise ValueError(f"{error}; did you mean {similar[0]}:...?" if similar else str(error)) from error
    environment = loading(source, "creating the environment", make, "; it is called without arguments")
    if not callable(getattr(environment, "episode", None)):
        raise ValueError(
            f"{source}: a {type(environment).__name__} has no method episode(row, seed), which creates the episode of a response"
        )
    return environment
