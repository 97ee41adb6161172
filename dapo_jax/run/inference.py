"""Evaluating and sampling a model or a run, without training: what `dapo-jax eval` and `dapo-jax sample` call."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dapo_jax.config import (
    ConfigError,
    DataConfig,
    EvalConfig,
    OverlongConfig,
    ParallelConfig,
    RewardConfig,
    SamplingConfig,
)
from dapo_jax.data.prompts import held_out
from dapo_jax.data.rows import checked_rows
from dapo_jax.evaluation import problem_record, summarize
from dapo_jax.rollouts import Group, Verdict
from dapo_jax.run.policy import find_policy, mesh_of
from dapo_jax.run.prompts import held_out_prompts, prompt_format
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.run.rollout import Rollouts, grading
from dapo_jax.trackers.evaluation_log import write_problems
from dapo_jax.trackers.rollout_log import write_rollouts

_NO_SHAPING = OverlongConfig(enabled=False)
"""Scores count verdicts; how much longer a training response might have been is no matter here."""


def evaluate(
    source: str,
    *,
    data: str = "arithmetic",
    split: str = "test",
    data_dir: str = "~/.cache/dapo_jax/datasets",
    source_options: Mapping[str, Any] | None = None,
    prompt_template: str = "{prompt}",
    chat: bool = False,
    system_prompt: str = "",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_tokens: int = 64,
    max_response_tokens: int = 64,
    samples_per_prompt: int = 8,
    prompts: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    grader: str = "exact",
    answer_marker: str = "=",
    slots: int = 128,
    seed: int = 0,
    keep: str | None = None,
    compilation_cache: str = "~/.cache/dapo_jax/xla",
) -> dict[str, float]:
    """avg@k, pass@j and cons@k of a model or run folder on a dataset's split.

    `keep` names a folder for the rollouts, and in its folder problems/ for what each problem scored.

    Raises:
        ConfigError: no such model, dataset or grader, or a value out of range.
    """
    use_compilation_cache(compilation_cache)
    mesh = mesh_of(ParallelConfig())
    policy = find_policy(source, mesh=mesh)
    config = EvalConfig(
        prompts=prompts,
        samples_per_prompt=samples_per_prompt,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
    )
    asked = DataConfig(
        source=data,
        source_options=dict(source_options or {}),
        eval_split=split,
        data_dir=data_dir,
        prompt_template=prompt_template,
        chat=chat,
        system_prompt=system_prompt,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        max_prompt_tokens=max_prompt_tokens,
    )
    sampling = SamplingConfig(
        max_response_tokens=max_response_tokens,
        slots=slots,
        stop=list(stop),
        stop_token_ids=list(stop_token_ids),
    )
    [found] = held_out_prompts(asked, config, policy.tokenizer).values()
    rollouts = Rollouts(
        policy,
        mesh,
        sampling,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        compute_dtype="float32",
        group_size=samples_per_prompt,
    )
    reward = RewardConfig(grader=grader, answer_marker=answer_marker, overlong=_NO_SHAPING)
    with closing(
        grading(reward, policy, max_response_tokens=max_response_tokens, stop=sampling.stop)
    ) as graders:
        groups = rollouts.evaluate(rollouts.transfer(policy.params), found, graders, config)
    if keep is not None:
        write_rollouts(Path(keep), 0, groups)
        # A folder below: `dapo-jax score` takes every JSONL file beside the rollouts for rollouts.
        write_problems(Path(keep) / "problems", map(problem_record, groups), name=data, step=0)
    return summarize(groups, name=data)


def sample(
    source: str,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    chat: bool = False,
    system_prompt: str = "",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    samples_per_prompt: int = 1,
    max_response_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    slots: int = 16,
    seed: int = 0,
    compilation_cache: str = "~/.cache/dapo_jax/xla",
) -> list[Group]:
    """Responses of a model or run folder to prompts of the caller's, each a text or a list of messages; the verdicts say
    nothing.

    Raises:
        ConfigError: no such model, an empty prompt, or a text that the model's tokenizer cannot take.
    """
    use_compilation_cache(compilation_cache)
    mesh = mesh_of(ParallelConfig())
    policy = find_policy(source, mesh=mesh)
    asked = DataConfig(
        chat=chat, system_prompt=system_prompt, chat_template_kwargs=dict(chat_template_kwargs or {})
    )
    sampling = SamplingConfig(
        max_response_tokens=max_response_tokens,
        slots=slots,
        stop=list(stop),
        stop_token_ids=list(stop_token_ids),
    )
    try:
        rows = checked_rows([{"prompt": text, "answer": "-"} for text in prompts])
        found = held_out(
            rows,
            policy.tokenizer,
            max_prompt_tokens=policy.decoder.max_positions - max_response_tokens,
            prompt_format=prompt_format(asked),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    rollouts = Rollouts(
        policy,
        mesh,
        sampling,
        seed=seed,
        max_prompt_tokens=max(len(prompt.tokens) for prompt in found),
        compute_dtype="float32",
        group_size=samples_per_prompt,
    )
    config = EvalConfig(
        samples_per_prompt=samples_per_prompt, temperature=temperature, top_p=top_p, top_k=top_k
    )
    ungraded = grading(
        RewardConfig(overlong=_NO_SHAPING),
        policy,
        max_response_tokens=max_response_tokens,
        stop=sampling.stop,
        reward=lambda sample: Verdict(correct=False, reason="not graded"),
    )
    return rollouts.evaluate(rollouts.transfer(policy.params), found, ungraded, config)
