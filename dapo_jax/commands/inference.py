"""Evaluates and samples a model or a run, without training."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dapo_jax.config import (
    ConfigError,
    EvalConfig,
    EvaluateConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    SamplingConfig,
    load_config,
    load_evaluation,
)
from dapo_jax.config.keys import SEED, Rules, check_value, prefixed
from dapo_jax.config.loading import OF_TRAINING
from dapo_jax.dapo.rollouts import Group, Verdict
from dapo_jax.data.prompts import held_out
from dapo_jax.data.rows import checked_rows
from dapo_jax.evaluation import lost_verdicts, problem_record, summarize
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.rewards.functions import Rewards
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.grader_setup import check_graders, environment_of, episodes_of, grading
from dapo_jax.run.meshes import meshes_of
from dapo_jax.run.policy import Policy, find_policy
from dapo_jax.run.prompt_sets import GivenRows, every_split, held_out_prompts, with_template_date
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.run.run_dir import checked_folder
from dapo_jax.run.sampler_programs import sharing
from dapo_jax.run.sampler_setup import evaluation_spec, response_sampler, sampler_spec
from dapo_jax.run.sources import data_of_run, run_at, tokenizer_of
from dapo_jax.storage import AnyPath
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.trackers.rollout_log import write_problems, write_rollouts


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores and graded responses, returned by `evaluate`."""

    scores: dict[str, float]
    """Metrics such as `eval/NAME/avg@32`, from `evaluation.summarize`."""
    groups: dict[str, list[Group]]
    """Maps the name of each dataset to its graded groups."""
    metric: str = "correct"
    """`score` if the training run's `dynamic_sampling.metric` is `score` and the grader returned scores, else `correct`."""
    notes: Sequence[str] = ()
    """Messages about rows of the datasets that are left out, and about responses without a verdict."""


def evaluate(
    model: str,
    config: EvaluateConfig | str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    rows: GivenRows | None = None,
    reward: Rewards | None = None,
    keep: str | AnyPath | None = None,
) -> Evaluation:
    """Measures avg@k, pass@k and cons@k of a model or a run on held-out prompts, like the evaluations during training.

    Args:
        model: `preset:NAME`, `shipped:NAME`, `hf:ORG/NAME`, a model folder, or a run folder (its latest checkpoint).
        config: an `EvaluateConfig`, or an evaluation, training or warm-start configuration file. Defaults to the run's configuration, if `model` is a run.
        overrides: strings `key=value`, which override configuration keys.
        rows: rows with `prompt` and `answer` to evaluate on, instead of a dataset.
        reward: function that grades one `rewards.Sample`. Defaults to `config.reward.grader`.
        keep: folder to which all rollouts (FOLDER/NAME/step_000000.jsonl) and the scores of each problem (FOLDER/problems/NAME.jsonl) are written.

    Raises:
        ConfigError: there is no such model, dataset or grader, or a value cannot be used.
    """
    config, metric = _configured(model, config, overrides)
    kept = None if keep is None else checked_folder(keep, key="keep", write=True)
    use_compilation_cache()
    checked = check_graders(config.reward, config.sandbox, reward=reward)  # before the model loads
    environment = environment_of(config, reward=reward)
    config = replace(config, data=with_template_date(config.data, like=data_of_run(model)))
    tokenizer = tokenizer_of(ModelConfig(source=model))
    held_out, notes = held_out_prompts(config.data, config.eval, tokenizer, rows=rows)
    policy, sampler_of = _loaded(model, config.parallel, config.sampling, config.compute_dtype)
    sampler = sampler_of(evaluation_spec(config), seed=config.seed)
    groups_of: dict[str, list[Group]] = {}
    episodes = episodes_of(environment, config, policy.tokenizer)
    graders = grading(config, policy, graders=checked, episodes=episodes)
    with closing(graders):
        weights = sampler.transfer(policy.params)
        for name, prompts in held_out.items():
            options = {"name": name, "step": policy.step, "environments": episodes}
            groups_of[name] = sampler.evaluate(weights, prompts, graders.groups, config.eval, **options)
            if kept is not None:
                write_rollouts(kept / quote(name, safe=""), 0, groups_of[name])
                write_problems(kept / "problems", map(problem_record, groups_of[name]), name=name, step=0)
    scores: dict[str, float] = {}
    for name, groups in groups_of.items():
        scores |= summarize(groups, name=name)
        notes += [f"{name}: {lost}"] if (lost := lost_verdicts(groups)) else []
    rollouts = (rollout for groups in groups_of.values() for group in groups for rollout in group.rollouts)
    if all(rollout.verdict.score is None for rollout in rollouts):
        metric = "correct"
    return Evaluation(scores=scores, groups=groups_of, metric=metric, notes=notes)


def _configured(
    model: str, config: EvaluateConfig | str | Path | None, overrides: Sequence[str]
) -> tuple[EvaluateConfig, str]:
    """Returns the evaluation configuration (from `config`, or from the run `model`), and the `dynamic_sampling.metric` that training used."""
    run = run_at(model)
    of_run = None if run is None else run / "config.yaml"
    if isinstance(config, EvaluateConfig):
        if overrides:
            raise ConfigError(
                f"overrides={list(overrides)} require a configuration file, but an EvaluateConfig was given; set these keys in it"
            )
        loaded, file = config, None
    else:
        file = of_run if config is None else config
        loaded = load_evaluation(file, overrides)
    of_training = [each for each in overrides if each.startswith(OF_TRAINING)]
    for path, changes in ((file, of_training), (file, overrides), (of_run, ())):
        with suppress(ConfigError):  # the file may not be a training configuration
            if path is not None:
                return loaded, load_config(path, changes).dynamic_sampling.metric
    return loaded, "correct"


def _loaded(
    model: str, parallel: ParallelConfig, sampling: SamplingConfig, dtype: str
) -> tuple[Policy, Callable[..., ResponseSampler]]:
    """Loads a policy. Returns the policy, and a function that builds samplers for it with `response_sampler`."""
    meshes = meshes_of(parallel)
    policy = find_policy(model, mesh=meshes.train, shares=sharing(meshes, sampling, dtype=dtype))
    resident = bytes_on_device((policy.params, policy.unshared), meshes.train.shape)
    return policy, partial(response_sampler, policy, meshes, resident=resident)


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
) -> list[Group]:
    """Samples responses from a model or run folder, without grading. Each prompt is a text or a list of messages.

    The prompts of a run have the format of its section `data`, and its stop strings and ids end their responses. Arguments that are set replace these values.

    Raises:
        ConfigError: there is no such model, a prompt is empty, the model's tokenizer cannot encode it, or the model has too few positions.
    """
    config = EvalConfig(
        samples_per_prompt=samples_per_prompt, temperature=temperature, top_p=top_p, top_k=top_k
    )
    check_value("seed", seed, int, Rules(range=SEED))
    run = run_at(source)
    trained = EvaluateConfig() if run is None else load_evaluation(run / "config.yaml")
    kept = trained.sampling
    ends = {"stop": list(stop or kept.stop), "stop_token_ids": list(stop_token_ids or kept.stop_token_ids)}
    sampling = SamplingConfig(max_response_tokens=max_response_tokens, slots=slots, **ends)
    use_compilation_cache()
    policy, sampler_of = _loaded(source, ParallelConfig(), sampling, "float32")
    chat = chat or trained.data.chat
    if run is not None and not chat and policy.tokenizer.chat_template is not None:
        with suppress(ConfigError):  # the dataset may not be on this machine
            chat = any(not isinstance(rows[0]["prompt"], str) for rows in every_split(trained.data).values())
    variables = dict(chat_template_kwargs or trained.data.chat_template_kwargs)
    system_prompt = system_prompt or trained.data.system_prompt
    data = replace(trained.data, chat=chat, system_prompt=system_prompt, chat_template_kwargs=variables)
    positions = policy.decoder.max_positions
    if max_response_tokens >= positions:
        needs = f"must be at most {positions - 1}, because the model has {positions} positions for prompt and response"
        raise ConfigError(f"max_response_tokens={max_response_tokens} (--max-response-tokens) {needs}")
    with prefixed(""):
        asked = held_out(
            checked_rows([{"prompt": text, "answer": "-"} for text in prompts]),
            policy.tokenizer,
            max_prompt_tokens=positions - max_response_tokens,
            prompt_format=PromptFormat(with_template_date(data)),
        )
    longest = max(len(prompt.tokens) for prompt in asked)
    spec = sampler_spec(
        sampling, max_prompt_tokens=longest, group_size=samples_per_prompt, compute_dtype="float32"
    )
    sampler = sampler_of(spec, seed=seed)
    unread = check_graders(RewardConfig(), reward=lambda sample: Verdict(correct=False, reason="not graded"))
    ungraded = grading(EvaluateConfig(sampling=sampling), policy, graders=unread)
    weights = sampler.transfer(policy.params)
    return sampler.evaluate(weights, asked, ungraded.groups, config, name="", step=0)
