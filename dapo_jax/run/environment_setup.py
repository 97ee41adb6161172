"""Makes the environment of a run from its configuration."""

import math
from datetime import date

from dapo_jax.config import ConfigError, EnvironmentConfig, EvaluateConfig, TrainConfig
from dapo_jax.environments import Environment, Episodes, load_environment
from dapo_jax.environments.rendering import Rendering
from dapo_jax.environments.worker_environment import WorkerEnvironment, worker_environment
from dapo_jax.rewards.functions import Rewards
from dapo_jax.run.grader_setup import WORKER_MEMORY_MB
from dapo_jax.run.policy import Policy
from dapo_jax.text.stop_strings import StopStrings


def environment_of(config: EnvironmentConfig, *, reward: Rewards | None = None) -> Environment | None:
    """Returns the environment of a run, or None if none is configured. Call it once, before slow work.

    Raises:
        ConfigError: it cannot be made, or `reward` was given as well.
    """
    if not config.source:
        return None
    if reward is not None:
        raise ConfigError(
            f"environment.source={config.source!r} gives the reward of an episode, and a reward function was given as well: leave one of the two out"
        )
    try:
        if config.workers:
            return worker_environment(
                config.source,
                workers=config.workers,
                timeout_s=config.timeout_s,
                memory_mb=WORKER_MEMORY_MB,
            )
        return load_environment(config.source)
    except ValueError as error:
        raise ConfigError(f"environment.source: {error}") from error


def episodes_of(
    environment: Environment | None, config: TrainConfig | EvaluateConfig, policy: Policy
) -> Episodes | None:
    """Returns the episodes of a run or an evaluation, which the caller closes; None without an environment."""
    if environment is None:
        return None
    limits, data, tokenizer = config.environment, config.data, policy.tokenizer
    in_workers = isinstance(environment, WorkerEnvironment)
    text = StopStrings(tokenizer, config.sampling.stop) if config.sampling.stop else tokenizer
    return Episodes(
        environment,
        Rendering(
            tokenizer=tokenizer,
            template_kwargs=data.chat_template_kwargs,
            today=date.fromisoformat(data.template_date) if data.template_date else None,
        ),
        text_of=text.decode,
        seed=config.seed,
        max_turns=limits.max_turns,
        turn_tokens=limits.turn_tokens,
        episode_tokens=limits.episode_tokens,
        timeout_s=math.inf if in_workers else limits.timeout_s,  # workers keep the time limit
        name=limits.source,
        on_close=environment.close if in_workers else lambda: None,
    )
