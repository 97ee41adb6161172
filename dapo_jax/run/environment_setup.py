"""The environment of a run, made from its configuration."""

import math
from datetime import date

from dapo_jax.config import ConfigError, EnvironmentConfig, EvaluateConfig, TrainConfig
from dapo_jax.environments import Environment, Episodes, load_environment
from dapo_jax.environments.rendering import Rendering
from dapo_jax.environments.worker_environment import WorkerEnvironment, worker_environment
from dapo_jax.rewards.functions import Rewards
from dapo_jax.run.policy import Policy
from dapo_jax.text.stop_strings import StopStrings


def environment_of(config: EnvironmentConfig, *, reward: Rewards | None = None) -> Environment | None:
    """The environment of a run, or None: to be made once, and before what takes long.

    Raises:
        ConfigError: it cannot be made, or there is a `reward` beside it.
    """
    if not config.source:
        return None
    if reward is not None:
        raise ConfigError(
            f"environment.source={config.source!r} says what an episode is worth, and a reward was given, too: leave one of the two out"
        )
    try:
        if config.workers:
            return worker_environment(
                config.source,
                workers=config.workers,
                timeout_s=config.timeout_s,
                memory_mb=config.worker_memory_mb,
            )
        return load_environment(config.source)
    except ValueError as error:
        raise ConfigError(f"environment.source: {error}") from error


def episodes_of(
    environment: Environment | None, config: TrainConfig | EvaluateConfig, policy: Policy
) -> Episodes | None:
    """The episodes of a run or an evaluation, which are to be closed; None without an environment."""
    if environment is None:
        return None
    told, data, tokenizer = config.environment, config.data, policy.tokenizer
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
        max_turns=told.max_turns,
        turn_tokens=told.turn_tokens,
        episode_tokens=told.episode_tokens,
        timeout_s=math.inf if in_workers else told.timeout_s,  # workers know when a call is under way
        calls=told.calls,
        name=told.source,
        on_close=environment.close if in_workers else lambda: None,
    )
