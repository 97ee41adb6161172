"""Every rule a configuration must obey. A check names the key, the value and the remedy, and changes nothing.

They run whenever a configuration object is built, from a file or in Python: one that exists can be run.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, get_type_hints

from dapo_jax.config import data_schema, evaluate_schema, guard_schema, schema, sft_schema
from dapo_jax.config.data_checks import check_data, check_eval
from dapo_jax.config.entries import entries
from dapo_jax.config.values import check_value, refuse

SECTIONS: dict[type, str] = {
    schema.TrainConfig: "",
    sft_schema.SftConfig: "",
    evaluate_schema.EvaluateConfig: "",
    schema.ModelConfig: "model",
    data_schema.DataConfig: "data",
    schema.SamplingConfig: "sampling",
    schema.RewardConfig: "reward",
    schema.OverlongConfig: "reward.overlong",
    schema.DynamicSamplingConfig: "dynamic_sampling",
    schema.BatchConfig: "batch",
    sft_schema.SftBatchConfig: "batch",
    schema.LossConfig: "loss",
    schema.OptimizerConfig: "optimizer",
    schema.EvalConfig: "eval",
    schema.CheckpointConfig: "checkpoint",
    schema.LogConfig: "log",
    guard_schema.GuardConfig: "guard",
    guard_schema.WatchdogsConfig: "watchdogs",
    schema.ParallelConfig: "parallel",
}


@cache
def field_types(section: type) -> dict[str, Any]:
    """Name and annotation of each field of a configuration class."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def check(config: Any) -> None:
    """Checks one section, or a whole configuration whose sections were checked when they were built.

    Raises:
        ConfigError: a value is of the wrong type, out of its range, or contradicts another.
    """
    section = next(cls for cls in type(config).__mro__ if cls in SECTIONS)
    for name, expected in field_types(section).items():
        key = f"{SECTIONS[section]}.{name}".lstrip(".")
        value = getattr(config, name)
        if not dataclasses.is_dataclass(expected):
            check_value(key, value, expected)
        elif not isinstance(value, expected):
            refuse(key, value, f"a {expected.__name__}", f"write {name}={expected.__name__}(...)")
    _TOGETHER.get(section, lambda _: None)(config)


def _check_model(model: schema.ModelConfig) -> None:
    if model.revision and not model.source.startswith("hf:"):
        refuse(
            "model.revision",
            model.revision,
            "a model.source of the form hf:ORG/NAME",
            f"{model.source!r} has no revisions: leave the key out",
        )


def _check_sampling(sampling: schema.SamplingConfig) -> None:
    if "" in sampling.stop:
        remedy = "an empty string is in every text, so every response would end at once: remove it"
        refuse("sampling.stop", sampling.stop, "strings with a character or more", remedy)
    if any(token < 0 for token in sampling.stop_token_ids):
        refuse(
            "sampling.stop_token_ids",
            sampling.stop_token_ids,
            "ids of 0 or more",
            "write the tokenizer's ids",
        )


def _check_overlong(overlong: schema.OverlongConfig) -> None:
    if overlong.enabled and overlong.buffer_tokens < 1:
        remedy = "make it larger, or set reward.overlong.enabled=false"
        refuse(
            "reward.overlong.buffer_tokens",
            overlong.buffer_tokens,
            "1 or more for the soft punishment",
            remedy,
        )


def _check_reward(reward: schema.RewardConfig) -> None:
    if reward.correct <= reward.incorrect:
        needs = f"more than reward.incorrect = {reward.incorrect}"
        refuse(
            "reward.correct",
            reward.correct,
            needs,
            "raise it: a right answer must be worth more than a wrong one",
        )
    entries("reward.graders", reward.graders, schema.GraderConfig)
    if reward.graders and reward.grader != schema.RewardConfig.grader:
        remedy = "reward.graders replaces it: put it into the list, or leave it out"
        refuse("reward.grader", reward.grader, "no value beside reward.graders", remedy)


def _check_dynamic_sampling(dynamic: schema.DynamicSamplingConfig) -> None:
    if dynamic.enabled and dynamic.max_waves < 1:
        remedy = "raise it, or set dynamic_sampling.enabled=false"
        refuse("dynamic_sampling.max_waves", dynamic.max_waves, "1 or more for dynamic sampling", remedy)


def _check_batch(batch: schema.BatchConfig) -> None:
    step, update = batch.prompts_per_step, batch.groups_per_update
    updates, rest = divmod(step, update)
    if rest:
        multiples = " or ".join(str(k * update) for k in (updates, updates + 1) if k)
        refuse(
            "batch.prompts_per_step",
            step,
            f"a multiple of batch.groups_per_update = {update}",
            f"{step} = {updates} x {update} + {rest}: use {multiples}, or a batch.groups_per_update that divides {step}",
        )


def _check_loss(loss: schema.LossConfig) -> None:
    low, high = loss.clip_ratio_low, loss.clip_ratio_high
    if high < low:
        needs = f"at least loss.clip_ratio_low = {low}"
        refuse("loss.clip_ratio_high", high, needs, f"{high} < {low}: raise it, or lower loss.clip_ratio_low")
    if loss.importance_cap is not None and loss.old_logprobs == "sampler":
        refuse(
            "loss.importance_cap",
            loss.importance_cap,
            "null with loss.old_logprobs = 'sampler'",
            "it caps pi_old / pi_sampler, which is 1 everywhere when pi_old is the sampler's: "
            "set loss.old_logprobs=trainer or loss.importance_cap=null",
        )


def _check_parallel(parallel: schema.ParallelConfig) -> None:
    rest = [
        f"parallel.{name}" for name in field_types(schema.ParallelConfig) if getattr(parallel, name) == -1
    ]
    if len(rest) > 1:
        refuse(
            rest[1],
            -1,
            f"a size, as {rest[0]} is -1 too",
            "only one axis can take the devices that the others leave",
        )


def _check_attention(model: schema.ModelConfig, *, packing: bool) -> None:
    if model.attention != "cudnn":
        return
    if packing:
        remedy = "set batch.packing=false (a rollout a row), or model.attention=xla"
        refuse("model.attention", "cudnn", "rows that hold one rollout", remedy)
    if model.compute_dtype != "bfloat16":
        remedy = "set it to bfloat16, or model.attention=xla"
        refuse("model.compute_dtype", model.compute_dtype, "bfloat16 for model.attention = 'cudnn'", remedy)


def _check_guard(guard: guard_schema.GuardConfig, loss: schema.LossConfig) -> None:
    if guard.on_mismatch != "warn" and guard.max_mismatch_kl is None:
        remedy = "write the limit, such as 0.01"
        refuse(
            "guard.max_mismatch_kl", None, f"a number for guard.on_mismatch = {guard.on_mismatch!r}", remedy
        )
    if guard.on_mismatch != "correct":
        return
    if loss.old_logprobs == "sampler":
        remedy = "the ratio to the sampler's log-probabilities corrects already: set guard.on_mismatch=warn"
        refuse("guard.on_mismatch", "correct", "loss.old_logprobs = 'trainer'", remedy)
    if loss.importance_cap is not None:
        needs = f"loss.importance_cap = null, found {loss.importance_cap}"
        refuse("guard.on_mismatch", "correct", needs, "that corrects every step already: set one of the two")


def check_train(config: schema.TrainConfig) -> None:
    """Checks what sections of a training configuration say about each other."""
    _check_guard(config.guard, config.loss)
    _check_attention(config.model, packing=config.batch.packing)
    _check_training_policy(config.sampling)
    batch, waves = config.batch, config.dynamic_sampling
    if waves.enabled:
        wave = config.prompts_per_wave
        most = wave * waves.max_waves
        if most < batch.prompts_per_step:
            refuse(
                "dynamic_sampling.max_waves",
                waves.max_waves,
                f"waves enough for batch.prompts_per_step = {batch.prompts_per_step} groups",
                f"{waves.max_waves} x {wave} = {most} < {batch.prompts_per_step}: raise max_waves to "
                f"{-(-batch.prompts_per_step // wave)} or more, or dynamic_sampling.prompts_per_wave",
            )
        if batch.group_size < 2:
            refuse(
                "batch.group_size",
                batch.group_size,
                "2 or more with dynamic sampling",
                "a group of one is never mixed and all would be dropped: raise it, or set dynamic_sampling.enabled=false",
            )
    overlong, limit = config.reward.overlong, config.sampling.max_response_tokens
    if overlong.enabled and overlong.buffer_tokens > limit:
        refuse(
            "reward.overlong.buffer_tokens",
            overlong.buffer_tokens,
            f"at most sampling.max_response_tokens = {limit}",
            f"{overlong.buffer_tokens} > {limit}: the paper's is a fifth of the limit, here {max(1, limit // 5)}; "
            "or set reward.overlong.enabled=false",
        )
    _check_row(batch.row_tokens, config.data.max_prompt_tokens, limit, "sampling.max_response_tokens")


def check_sft(config: sft_schema.SftConfig) -> None:
    """Checks what sections of a supervised configuration say about each other."""
    _check_attention(config.model, packing=config.batch.packing)
    _check_row(
        config.batch.row_tokens,
        config.data.max_prompt_tokens,
        config.max_response_tokens,
        "max_response_tokens",
    )


def _check_training_policy(sampling: schema.SamplingConfig) -> None:
    """Refuses to train on samples from another distribution than the one whose ratio is taken."""
    why = (
        "the ratio is taken to the full tempered distribution, which would no longer be the one sampled from"
    )
    if sampling.temperature == 0:
        remedy = "0 is greedy, all responses of a group would be equal: greedy is for eval.temperature only"
        refuse("sampling.temperature", sampling.temperature, "more than 0 for training", remedy)
    if sampling.top_p != 1:
        refuse("sampling.top_p", sampling.top_p, "1 (off) for training", f"{why}: only eval.top_p may cut")
    if sampling.top_k > 0:
        refuse(
            "sampling.top_k", sampling.top_k, "0 or -1 (off) for training", f"{why}: only eval.top_k may cut"
        )


def _check_row(row: int, prompt: int, response: int, response_key: str) -> None:
    if 0 < row < prompt + response:
        refuse(
            "batch.row_tokens",
            row,
            f"0, or at least data.max_prompt_tokens + {response_key}",
            f"{prompt} + {response} = {prompt + response} > {row}: raise it to {prompt + response}, or lower the two",
        )


_TOGETHER: dict[type, Callable[[Any], None]] = {
    schema.TrainConfig: check_train,
    sft_schema.SftConfig: check_sft,
    schema.ModelConfig: _check_model,
    data_schema.DataConfig: check_data,
    schema.SamplingConfig: _check_sampling,
    schema.OverlongConfig: _check_overlong,
    schema.RewardConfig: _check_reward,
    schema.DynamicSamplingConfig: _check_dynamic_sampling,
    schema.BatchConfig: _check_batch,
    schema.LossConfig: _check_loss,
    schema.EvalConfig: check_eval,
    schema.ParallelConfig: _check_parallel,
}
"""What the values of one object say about each other."""
