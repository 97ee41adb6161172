"""Builds graders and the environment from a configuration. A grader runs in this process, in workers, or on an event loop."""

import math
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from typing import Any, NamedTuple

from dapo_jax.config import (
    ConfigError,
    EvaluateConfig,
    RewardConfig,
    SandboxConfig,
    SftConfig,
    TrainConfig,
)
from dapo_jax.config.keys import prefixed
from dapo_jax.config.reward_schema import GRADER_WORKERS, Workers
from dapo_jax.config.section import entry
from dapo_jax.environments import Environment, Episodes, load_environment
from dapo_jax.environments.rendering import Rendering
from dapo_jax.environments.worker_environment import WorkerEnvironment
from dapo_jax.rewards import TEXT_RULES
from dapo_jax.rewards.async_calls import AsyncCalls
from dapo_jax.rewards.code_grader import CodeGrader
from dapo_jax.rewards.functions import LoadedReward, RewardFunction, Rewards, Submit, load_reward
from dapo_jax.rewards.graders import ROW_GRADERS, kimi_length
from dapo_jax.rewards.grading import Grading, Part, immediately, part_names, weighted_sum
from dapo_jax.rewards.grading_pool import GradingPool
from dapo_jax.rewards.judge import Judge
from dapo_jax.rewards.shaping import Shaping
from dapo_jax.run.policy import Policy
from dapo_jax.sandbox import Limits, load_sandbox
from dapo_jax.text.stop_strings import StopStrings
from dapo_jax.text.tokenizers import Tokenizer
from dapo_jax.workers import Worker

IN_THIS_PROCESS = TEXT_RULES | ROW_GRADERS.keys()
"""Graders that run in this process, because they cannot hang, or because their rows cannot be sent to a worker as JSON."""

ASYNC_CALLS = 64
"""Maximum number of concurrent calls of async reward functions."""

WORKER_MEMORY_MB = 2048
"""Maximum memory in MiB that a worker may use in addition to its loaded grader or environment. Enforced only on Linux."""

Close = Callable[[], None]
StartWorker = Callable[..., Worker]
"""A function with the arguments of `Worker`, which starts a worker."""


def grading(
    config: TrainConfig | EvaluateConfig | SftConfig,
    policy: Policy,
    *,
    max_response_tokens: int | None = None,
    graders: Sequence["ConfiguredGrader"] = (),
    episodes: Episodes | None = None,
    on_submit: Callable[[], None] = lambda: None,
    worker: StartWorker = Worker,
) -> Grading:
    """Builds the `Grading` object that grades a run's responses. The caller must close it.

    Args:
        config: configures graders, workers and reward shaping. The text from a stop string on is not graded.
        policy: its tokenizer decodes the responses.
        max_response_tokens: maximum response length for the overlong penalty. If None, there is no penalty, because an evaluation measures verdicts.
        graders: the result of `check_graders`. If empty, the configured graders are loaded.
        episodes: the episodes of an environment. If given, the environment supplies the rewards instead of graders.
        on_submit: called before the responses to a prompt are submitted.
        worker: starts a worker, on this machine or on another one.
    """
    reward, stop = config.reward, config.sampling.stop
    overlong = reward.overlong
    submit, close = (
        submit_of(reward, graders, workers=config.workers.of_graders, sandbox=config.sandbox, worker=worker)
        if episodes is None
        else (episodes.verdicts, episodes.close)
    )
    shaping = Shaping(
        correct=reward.correct,
        incorrect=reward.incorrect,
        overlong=overlong.enabled and max_response_tokens is not None,
        max_response_tokens=max_response_tokens or 0,
        buffer_tokens=overlong.buffer_tokens,
        penalty_factor=overlong.penalty_factor,
    )
    # In an episode, a stop string ends a turn but not the response, so the text after it must be kept.
    tokenizer = StopStrings(policy.tokenizer, stop) if stop and episodes is None else policy.tokenizer
    return Grading(submit=submit, tokenizer=tokenizer, shaping=shaping, on_submit=on_submit, on_close=close)


def submit_of(
    config: RewardConfig,
    graders: Sequence["ConfiguredGrader"] = (),
    *,
    workers: Workers = GRADER_WORKERS,
    sandbox: SandboxConfig | None = None,
    worker: StartWorker = Worker,
) -> tuple[Submit, Close]:
    """Returns a function that submits a group to the graders, and a function that stops the graders' workers and event loop.

    `graders` is the result of `check_graders`. If empty, the configured graders are loaded. Raises ConfigError if a grader cannot be loaded, or its weight is
    missing. In this case nothing was started.
    """
    graders = graders or check_graders(config, sandbox)
    closing: list[Close] = []
    loop: AsyncCalls | None = None
    submits: list[Submit] = []
    for grader in graders:
        if grader.loaded.is_async:
            if loop is None:
                loop = AsyncCalls(at_once=ASYNC_CALLS, timeout_s=workers.timeout_s)
                closing.append(loop.close)
            submits.append(partial(loop.submit, grader.loaded))
            if isinstance(function := grader.loaded.function, CodeGrader):
                closing.append(function.close)
        elif grader.spec is None or not workers.count or grader.spec in IN_THIS_PROCESS:
            submits.append(immediately(grader.loaded.grade))
        else:
            pool = GradingPool(
                grader.spec,
                workers=workers.count,
                timeout_s=workers.timeout_s,
                memory_mb=WORKER_MEMORY_MB,
                answer_marker=config.answer_marker,
                whole_group=grader.loaded.is_whole_group,
                worker=worker,
            )
            submits.append(pool.submit)
            closing.append(pool.close)

    def close() -> None:
        for end in closing:
            end()

    weights = part_weights(graders)
    parts = [
        Part(name=name, weight=weight, submit=submit, only_correct=grader.loaded.function is kimi_length)
        for (name, weight), grader, submit in zip(weights.items(), graders, submits, strict=False)
    ]
    rule = Shaping(correct=config.correct, incorrect=config.incorrect)
    return weighted_sum(parts, rule) if parts else submits[0], close


class ConfiguredGrader(NamedTuple):
    """A grader that is loaded, but not started."""

    loaded: LoadedReward
    spec: str | None
    """The name by which a worker loads the grader, or None for a function that was passed from Python."""
    weight: float | None
    """The grader's weight in the weighted sum of rewards, or None if it is the only grader."""


def part_weights(graders: Sequence[ConfiguredGrader]) -> dict[str, float]:
    """Returns the weight of each grader by its name in `Verdict.parts`. Empty for a single grader without a weight."""
    names = part_names([grader.loaded.name for grader in graders])
    return {name: g.weight for name, g in zip(names, graders, strict=True) if g.weight is not None}


def check_graders(
    config: RewardConfig, sandbox: SandboxConfig | None = None, *, reward: Rewards | None = None
) -> list[ConfiguredGrader]:
    """Loads the configured graders, or `reward` instead, without starting them. Raises ConfigError if a grader cannot be loaded, or its weight is missing. The
    grader `code` needs `sandbox` (None: the default), which is tested here."""

    def loaded(key: str, spec: str | RewardFunction, weight: float | None = None) -> ConfiguredGrader:
        with prefixed(key):
            kind, _, path = spec.partition(":") if isinstance(spec, str) else ("", "", "")
            function = spec
            if kind == "judge":
                function = Judge(path)
            elif kind == "code":
                section = sandbox or SandboxConfig()
                limits = entry("sandbox.limits", section.limits, Limits)
                server = load_sandbox(section.backend, slots=section.slots, python=section.python)
                function = CodeGrader(server, limits, path)
            reward = load_reward(function, answer_marker=config.answer_marker)
        return ConfiguredGrader(reward, spec if isinstance(spec, str) else None, weight)

    if reward is None and isinstance(config.grader, str):
        graders = [loaded("reward.grader", config.grader)]
    elif reward is None:
        listed = enumerate(config.graders)
        graders = [loaded(f"reward.grader[{n}].grader", g.grader, g.weight) for n, g in listed]
    elif callable(reward):
        graders = [loaded("reward", reward)]
    else:
        graders = [loaded(f"reward[{n}]", *pair) for n, pair in enumerate(weighted(reward))]
    if graders[0].loaded.function is kimi_length:
        raise ConfigError(
            "kimi_length needs another grader before it, for example reward.grader=[{grader: math}, {grader: kimi_length, weight: 0.5}]"
        )
    return graders


def weighted(reward: object) -> list[tuple[str | RewardFunction, float]]:
    """Checks a list of (function or grader's name, weight) pairs that was passed from Python. Raises ConfigError if `reward` is not such a list. The message
    names the index of the invalid entry."""
    if not isinstance(reward, list | tuple) or not reward:
        raise ConfigError(
            f"reward: found {reward!r:.80}, needs a function or a list of (function, weight) pairs, or None to use the configured grader"
        )
    for index, pair in enumerate(reward):
        function, weight = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        is_weight = isinstance(weight, int | float) and weight != 0 and math.isfinite(weight)
        if not is_weight or not (isinstance(function, str) or callable(function)):
            needs = "a pair of a function (or a grader's name) and its weight, a finite number other than 0"
            raise ConfigError(f"reward[{index}]: found {pair!r:.80}, needs {needs}; write (function, 1.0)")
    return [(function, float(weight)) for function, weight in reward]


def environment_of(
    config: TrainConfig | EvaluateConfig, *, reward: Rewards | None = None, worker: StartWorker = Worker
) -> Environment | None:
    """Loads the environment of a run, or returns None if no environment is configured. Call it before slow work such as loading a model. Raises ConfigError if
    the environment cannot be loaded, or `reward` was given as well."""
    source, workers = config.environment.source, config.workers.of_environment
    if not source:
        return None
    if reward is not None:
        raise ConfigError(
            f"environment.source={source!r} supplies the rewards, but a reward function was given as well; remove one of them"
        )
    options = dict[str, Any]()
    if (section := config.environment).is_agent:
        options = {name: getattr(section, name) for name in ("variables", "history")}
        options["stop"] = config.sampling.stop
    with prefixed("environment.source"):
        if workers.count:
            return WorkerEnvironment(
                source,
                workers=workers.count,
                timeout_s=workers.timeout_s,
                memory_mb=WORKER_MEMORY_MB,
                worker=worker,
                **options,
            )
        return load_environment(source, **options)


def episodes_of(
    environment: Environment | None,
    config: TrainConfig | EvaluateConfig,
    tokenizer: Tokenizer,
    *,
    worker: StartWorker = Worker,
) -> Episodes | None:
    """Returns the episodes of a run or an evaluation, or None if there is no environment. The caller must close the episodes."""
    if environment is None:
        return None
    limits, data = config.environment, config.data
    in_workers = isinstance(environment, WorkerEnvironment)
    text = StopStrings(tokenizer, config.sampling.stop) if config.sampling.stop else tokenizer
    grade: Submit | None = None
    closing = [environment.close] if in_workers else []
    if limits.is_agent and config.reward.grader != RewardConfig.grader:
        workers = config.workers.of_graders
        grade, close_graders = submit_of(
            config.reward, workers=workers, sandbox=config.sandbox, worker=worker
        )
        closing.append(close_graders)

    def close() -> None:
        for end in closing:
            end()

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
        timeout_s=math.inf
        if in_workers
        else config.workers.of_environment.timeout_s,  # workers enforce the limit themselves
        calls=limits.concurrency,
        name=limits.source,
        grade=grade,
        on_close=close,
    )
