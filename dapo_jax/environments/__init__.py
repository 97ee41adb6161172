"""Environments: what answers a turn of the policy, so that a response becomes an episode of several turns."""

from dapo_jax.environments.episodes import Episodes
from dapo_jax.environments.loading import load_environment
from dapo_jax.environments.protocol import Appended, Context, Environment, Episode, Message, Step, Turn

__all__ = [
    "Appended",
    "Context",
    "Environment",
    "Episode",
    "Episodes",
    "Message",
    "Step",
    "Turn",
    "load_environment",
]
