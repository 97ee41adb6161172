"""Runs environments of other libraries, unchanged: `environment.source` names the library before its first colon.

A package is imported only if the source names it.
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
"""Makers of environments, by the text before the first colon of `environment.source`. They are called with the rest."""

__all__ = ["ADAPTERS"]
