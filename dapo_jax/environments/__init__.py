"""Environments for multi-turn episodes. An environment answers each turn of the policy."""

from dapo_jax.environments.by_name import load_environment as load_environment
from dapo_jax.environments.episodes import Episodes as Episodes
from dapo_jax.environments.protocol import Appended as Appended
from dapo_jax.environments.protocol import Context as Context
from dapo_jax.environments.protocol import Environment as Environment
from dapo_jax.environments.protocol import Episode as Episode
from dapo_jax.environments.protocol import Message as Message
from dapo_jax.environments.protocol import Step as Step
from dapo_jax.environments.protocol import Turn as Turn
from dapo_jax.environments.tools import ToolEnvironment as ToolEnvironment
from dapo_jax.environments.tools import ToolEpisode as ToolEpisode
from dapo_jax.environments.tools import Tools as Tools
