"""SkyRL-Gym environments: `skyrl_gym:ID` for a registered environment, or `skyrl_gym:PLACE:Class` for your own.

In SkyRL-Gym 0.4.0, the class is instantiated with `env_config` and with the row's fields as `extras`. `init(messages)` returns the first
messages. `step(text)` returns observations as messages, the turn's reward, and whether the episode is over. `get_metrics()` and
`close()` are called at the end.
"""

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dapo_jax.environments.protocol import Context, Step, Turn
from dapo_jax.environments.tools import conversation
from dapo_jax.hints import did_you_mean, needing
from dapo_jax.rewards.functions import load_function


class SkyRLEnvironment:
    """Creates an instance of the SkyRL-Gym class for each response."""

    def __init__(self, name: str) -> None:
        """Looks up a registered environment by its id, or loads `PLACE:Class`. Raises ValueError if it or the package is missing."""
        self._make: Callable[..., Any] = load_function(name) if ":" in name else _registered(name)

    def episode(self, row: Mapping[str, Any], seed: int) -> "SkyRLEpisode":
        """Creates the episode for a response. If the row has no `reward_spec`, its `answer` is passed as the ground truth."""
        spec = {"method": "rule", "ground_truth": row.get("answer")}
        extras = {"reward_spec": spec, **{name: value for name, value in row.items() if name != "prompt"}}
        omegaconf = importlib.import_module("omegaconf")  # installed with skyrl-gym
        config = omegaconf.OmegaConf.create(dict(row.get("env_config") or {}))
        return SkyRLEpisode(self._make(env_config=config, extras=extras), row)


class SkyRLEpisode:
    """Adapts a SkyRL-Gym instance to the `Episode` interface. The instance's methods may block, so they run in threads."""

    def __init__(self, instance: Any, row: Mapping[str, Any]) -> None:
        self._instance, self._row = instance, row

    async def start(self) -> Context | None:
        """Returns the messages from `init`, or None if they are the same as the row's messages."""
        asked = conversation(self._row)
        messages, _ = await asyncio.to_thread(self._instance.init, [dict(message) for message in asked])
        return None if messages == asked else Context(messages)

    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn. Raises ValueError if the environment rewrites the turn, or gives no observation before the end."""
        action = turn.text + turn.stop_text  # as in SkyRL, whose environments look for stop strings
        result = await asyncio.to_thread(self._instance.step, action)
        if result.get("postprocessed_action") not in (None, action):
            raise ValueError("a postprocessed_action was returned, but sampled tokens cannot be rewritten")
        done = bool(result["done"])
        metrics = _numbers(result.get("metadata")) | (_numbers(self._instance.get_metrics()) if done else {})
        observed: Sequence[Any] = result["observations"]
        if not (done or observed):
            raise ValueError("the environment returned no observation, but the episode is not over")
        return Step(reward=float(result["reward"]), done=done, append=list(observed), metrics=metrics)

    async def close(self) -> None:
        """Closes the SkyRL-Gym instance."""
        await asyncio.to_thread(self._instance.close)


def _registered(name: str) -> Callable[..., Any]:
    with needing("skyrl-gym", f"skyrl_gym:{name} needs the package skyrl-gym"):
        package = importlib.import_module("skyrl_gym")
    if name not in package.registry:
        hint = did_you_mean(name, package.registry)
        raise ValueError(f"skyrl-gym has no environment {name!r} ({hint}); or use skyrl_gym:PLACE:Class")
    return partial(package.make, name)


def _numbers(metrics: Any) -> dict[str, float]:
    pairs = metrics.items() if isinstance(metrics, Mapping) else ()
    return {str(name): float(value) for name, value in pairs if isinstance(value, int | float)}
