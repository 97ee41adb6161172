"""Graders from a configuration: one, or several that are summed; each in this process, in workers, or on an event loop."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dapo_jax.config import ConfigError, GraderConfig, RewardConfig
from dapo_jax.config.section import entries
from dapo_jax.environments import Episodes
from dapo_jax.rewards import TEXT_RULES
from dapo_jax.rewards.async_calls import AsyncCalls
from dapo_jax.rewards.functions import LoadedReward, RewardFunction, Rewards, load_reward
from dapo_jax.rewards.grading import Grading, Part, Submit, immediately, part_names, weighted_sum
from dapo_jax.rewards.pool import GradingPool
from dapo_jax.rewards.shaping import Shaping
from dapo_jax.run.policy import Policy
from dapo_jax.text.stop_strings import StopStrings

IN_THIS_PROCESS = TEXT_RULES | {"reasoning_gym"}
"""Graders that no worker is needed for, or whose rows would not be the same on the other side of a pipe."""

Close = Callable[[], None]


def grading(
    config: RewardConfig,
    policy: Policy,
    *,
    max_response_tokens: int,
    stop: Sequence[str] = (),
    reward: Rewards | None = None,
    episodes: Episodes | None = None,
    on_submit: Callable[[], None] = lambda: None,
) -> Grading:
    """The grading of responses by their text before a `stop` string, which is to be closed.

    Args:
        config: names the graders and the shape of the reward.
        policy: its tokenizer turns responses into text.
        max_response_tokens: the limit that length shaping goes by.
        stop: strings that end a response.
        reward: replaces the configured graders.
        episodes: of an environment, which says what they were worth instead of a grader.
        on_submit: called before the responses to a prompt are handed to the graders.
    """
    overlong = config.overlong
    submit, close = (
        submit_of(config, reward=reward) if episodes is None else (episodes.verdicts, episodes.close)
    )
    shaping = Shaping(
        correct=config.correct,
        incorrect=config.incorrect,
        lost=config.lost,
        overlong=overlong.enabled,
        max_response_tokens=max_response_tokens,
        buffer_tokens=overlong.buffer_tokens,
        penalty_factor=overlong.penalty_factor,
    )
    # In an episode a stop string ends a turn, and more follows.
    tokenizer = StopStrings(policy.tokenizer, stop) if stop and episodes is None else policy.tokenizer
    return Grading(submit=submit, tokenizer=tokenizer, shaping=shaping, on_submit=on_submit, on_close=close)


def submit_of(config: RewardConfig, *, reward: Rewards | None = None) -> tuple[Submit, Close | None]:
    """The function that hands a group to the configured graders, and the one that ends their workers and event loop; None if there are none.

    `reward` replaces `reward.grader` and `reward.graders`.

    Raises:
        ConfigError: one of them cannot be loaded, or has no weight; nothing was started.
    """
    graders = _graders(config, reward)
    closing: list[Close] = []
    loop = None
    if any(grader.loaded.is_async for grader in graders):
        loop = AsyncCalls(at_once=config.async_calls, timeout_s=config.timeout_s)
        closing.append(loop.close)
    submits = []
    for grader in graders:
        submit, close = _started(grader, config, loop)
        submits.append(submit)
        closing += [close] if close is not None else []
    return _together(graders, submits, config), partial(_close_all, closing) if closing else None


def check_graders(config: RewardConfig, *, reward: Rewards | None = None) -> None:
    """Finds each grader of `submit_of` and starts none: to be called before what takes long.

    Raises:
        ConfigError: one of them cannot be loaded, or has no weight.
    """
    _graders(config, reward)


@dataclass(frozen=True, kw_only=True)
class _Grader:
    """A grader that was loaded, and not yet started."""

    loaded: LoadedReward
    spec: str | None
    """Its name for a worker; None for a function of this process."""
    weight: float | None = None
    """None: the only one, whose verdict is taken as it is."""


def _graders(config: RewardConfig, reward: Rewards | None) -> list[_Grader]:
    if reward is None and not config.graders:
        return [_loaded("reward.grader", config.grader, None, config)]
    if reward is None:
        listed = entries("reward.graders", config.graders, GraderConfig)
        return [
            _loaded(f"reward.graders[{place}].grader", entry.grader, entry.weight, config)
            for place, entry in enumerate(listed)
        ]
    if callable(reward):
        return [_loaded("reward", reward, None, config)]
    return [
        _loaded(f"reward[{place}]", spec, weight, config)
        for place, (spec, weight) in enumerate(weighted(reward))
    ]


def weighted(reward: object) -> list[tuple[str | RewardFunction, float]]:
    """Checks what was passed from Python as several rewards: a list of (function or grader's name, weight) pairs.

    Raises:
        ConfigError: it is none; the message names the place in the list.
    """
    if not isinstance(reward, list | tuple) or not reward:
        raise ConfigError(
            f"reward: found {reward!r:.80}, needs a function or a list of (function, weight) pairs; pass one of these, or "
            "None for the configured grader"
        )
    return [_pair(f"reward[{place}]", pair) for place, pair in enumerate(reward)]


def _pair(key: str, pair: object) -> tuple[str | RewardFunction, float]:
    if (
        not isinstance(pair, list | tuple)
        or len(pair) != 2
        or not (isinstance(pair[0], str) or callable(pair[0]))
    ):
        raise ConfigError(
            f"{key}: found {pair!r:.80}, needs a pair of a function (or a grader's name) and its weight; write "
            "(function, 1.0)"
        )
    function, weight = pair
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight == 0:
        raise ConfigError(
            f"{key}: found the weight {weight!r}, needs a finite number that is not 0; change it, or leave the pair out"
        )
    return function, float(weight)


def _loaded(key: str, spec: str | RewardFunction, weight: float | None, config: RewardConfig) -> _Grader:
    try:
        loaded = load_reward(spec, answer_marker=config.answer_marker, on_nonfinite=config.on_nonfinite)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    return _Grader(loaded=loaded, spec=spec if isinstance(spec, str) else None, weight=weight)


def _started(grader: _Grader, config: RewardConfig, loop: AsyncCalls | None) -> tuple[Submit, Close | None]:
    if grader.loaded.is_async:
        assert loop is not None
        return partial(loop.submit, grader.loaded), None
    if grader.spec is None or not config.workers or grader.spec in IN_THIS_PROCESS:
        return immediately(grader.loaded.grade), None
    pool = GradingPool(
        grader.spec,
        workers=config.workers,
        timeout_s=config.timeout_s,
        memory_mb=config.worker_memory_mb,
        answer_marker=config.answer_marker,
        whole_group=grader.loaded.is_whole_group,
        on_nonfinite=config.on_nonfinite,
    )
    return pool.submit, pool.close


def _together(graders: Sequence[_Grader], submits: Sequence[Submit], config: RewardConfig) -> Submit:
    names = part_names([grader.loaded.name for grader in graders])
    parts = [
        Part(name=name, weight=grader.weight, submit=submit)
        for name, grader, submit in zip(names, graders, submits, strict=True)
        if grader.weight is not None
    ]
    rule = Shaping(correct=config.correct, incorrect=config.incorrect, lost=config.lost)
    return weighted_sum(parts, rule) if parts else submits[0]


def _close_all(closing: Sequence[Close]) -> None:
    for close in closing:
        close()
