"""The environment of a run, made from its configuration."""

from datetime import date

from dapo_jax.config import ConfigError, EnvironmentConfig, EvaluateConfig, TrainConfig
from dapo_jax.environments import Environment, Episodes, load_environment
from dapo_jax.environments.rendering import Rendering
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
        timeout_s=told.timeout_s,
        calls=told.calls,
    )
