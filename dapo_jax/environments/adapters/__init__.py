"""Runs environments from other libraries without changes. The part of `environment.source` before the first colon is the name of the library.

A library is imported only if the source names it.
"""

from collections.abc import Callable
from typing import Any

from dapo_jax.environments.adapters.openenv import OpenEnvironment
from dapo_jax.environments.adapters.skyrl_gym import SkyRLEnvironment
from dapo_jax.environments.adapters.tinker import TinkerEnvironment
from dapo_jax.environments.adapters.trl import TrlEnvironment

ADAPTERS: dict[str, Callable[[str], Any]] = {
    "trl": TrlEnvironment,
    "skyrl_gym": SkyRLEnvironment,
    "openenv": OpenEnvironment,
    "tinker": TinkerEnvironment,
}
"""Maps a prefix of `environment.source` to an environment class. The class is instantiated with the text after the first colon."""

__all__ = ["ADAPTERS"]
