"""The environment of a run, made from its configuration."""

from datetime import date

from dapo_jax.config import ConfigError, EnvironmentConfig, EvaluateConfig, TrainConfig
from dapo_jax.environments import Environment, Episodes, load_environment
from dapo_jax.environments.rendering import Rendering
from dapo_jax.rewards.functions import Rewards
from dapo_jax.run.policy import Policy
from dapo_jax.text.stop_strings import StopStrings


def check_environment(config: EnvironmentConfig, *, reward: Rewards | None = None) -> None:
    """Makes the environment once: to be called before what takes long.

    Raises:
        ConfigError: it cannot be made, or there is a `reward` beside it.
    """
    if not config.source:
        return
    if reward is not None:
        raise ConfigError(
            f"environment.source={config.source!r} says what an episode is worth, and a reward was given, too: leave one of the two out"
        )
    _made(config)


def episodes_of(
    config: TrainConfig | EvaluateConfig, policy: Policy, *, reward: Rewards | None = None
) -> Episodes | None:
    """The episodes of a run or an evaluation, which are to be closed; None if it has no environment.

    Raises:
        ConfigError: the environment cannot be made.
    """
    check_environment(config.environment, reward=reward)
    told, data = config.environment, config.data
    if not told.source:
        return None
    tokenizer = policy.tokenizer
    text = StopStrings(tokenizer, config.sampling.stop) if config.sampling.stop else tokenizer
    return Episodes(
        _made(told),
        Rendering(
            tokenizer=tokenizer,
            template_kwargs=data.chat_template_kwargs,
            today=date.fromisoformat(data.template_date) if data.template_date else None,
        ),
        text_of=text.decode,
        seed=config.seed,
        max_turns=told.max_turns,
        turn_tokens=told.turn_tokens,
        timeout_s=told.timeout_s,
        calls=told.calls,
    )


def _made(config: EnvironmentConfig) -> Environment:
    try:
        return load_environment(config.source)
    except ValueError as error:
        raise ConfigError(f"environment.source: {error}") from error
