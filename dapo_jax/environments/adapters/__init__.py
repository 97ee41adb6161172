"""Environments of other libraries, unchanged: `environment.source` names the library before its first colon.

A file for each: the conventions of others are kept out of ours, and none of their packages is needed where it is not named.
"""

from collections.abc import Callable
from typing import Any

from dapo_jax.environments.adapters.openenv import OpenEnvironment
from dapo_jax.environments.adapters.reasoning_gym import reasoning_gym_environment
from dapo_jax.environments.adapters.skyrl_gym import SkyRLEnvironment
from dapo_jax.environments.adapters.tinker import TinkerEnvironment
from dapo_jax.environments.adapters.trl import TrlEnvironment

ADAPTERS: dict[str, Callable[[str], Any]] = {
    "trl": TrlEnvironment,
    "skyrl_gym": SkyRLEnvironment,
    "openenv": OpenEnvironment,
    "tinker": TinkerEnvironment,
    "reasoning_gym": reasoning_gym_environment,
}
"""The text before the first colon of `environment.source` -> what makes an environment of the rest."""

__all__ = ["ADAPTERS"]
