"""Environments for multi-turn episodes. An environment answers each turn of the policy."""

from dapo_jax.environments.by_name import load_environment
from dapo_jax.environments.episodes import Episodes
from dapo_jax.environments.protocol import Appended, Context, Environment, Episode, Message, Step, Turn
from dapo_jax.environments.tools import ToolEnvironment, ToolEpisode, Tools

__all__ = [
    "Appended",
    "Context",
    "Environment",
    "Episode",
    "Episodes",
    "Message",
    "Step",
    "ToolEnvironment",
    "ToolEpisode",
    "Tools",
    "Turn",
    "load_environment",
]
