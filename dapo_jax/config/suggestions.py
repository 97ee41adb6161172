"""What to say about a key that does not exist: our name for it, or the nearest one there is."""

from collections.abc import Collection
from difflib import SequenceMatcher

ALIASES = {
    # how many, and for how long
    "max_steps": "steps",
    "total_training_steps": "steps",
    "num_training_steps": "steps",
    "output_dir": "run_dir",
    "default_local_dir": "run_dir",
    "train_batch_size": "batch.prompts_per_step",
    "num_unique_prompts_rollout": "batch.prompts_per_step",
    "num_generations": "batch.group_size",
    "num_samples_per_prompt_rollout": "batch.group_size",
    "rollout.n": "batch.group_size",
    "n": "batch.group_size",
    "ppo_mini_batch_size": "batch.groups_per_update",
    "num_mini_batches": "batch.groups_per_update",
    "ppo_micro_batch_size_per_gpu": "batch.rows_per_microbatch",
    "per_device_train_batch_size": "batch.rows_per_microbatch",
    "gradient_accumulation_steps": "batch.rows_per_microbatch",
    "pack_length": "batch.row_tokens",
    "ppo_max_token_len_per_gpu": "batch.row_tokens",
    # lengths and sampling
    "max_completion_length": "sampling.max_response_tokens",
    "max_response_length": "sampling.max_response_tokens",
    "max_new_tokens": "sampling.max_response_tokens",
    "response_length": "sampling.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_prompt_token_length": "data.max_prompt_tokens",
    "max_num_seqs": "sampling.slots",
    # dynamic sampling
    "gen_batch_size": "dynamic_sampling.prompts_per_wave",
    "max_num_gen_batches": "dynamic_sampling.max_waves",
    "filter_groups": "dynamic_sampling",
    "filter_groups.enable": "dynamic_sampling.enabled",
    "filter_groups.metric": "dynamic_sampling.metric",
    "active_sampling": "dynamic_sampling.enabled",
    "filter_zero_std_samples": "dynamic_sampling.enabled",
    # reward
    "overlong_buffer": "reward.overlong",
    "overlong_buffer.enable": "reward.overlong.enabled",
    "overlong_buffer.len": "reward.overlong.buffer_tokens",
    "mask_truncated_completions": "reward.overlong.filter_truncated",
    "reward_funcs": "reward.grader",
    "custom_reward_function": "reward.grader",
    # loss
    "epsilon": "loss.clip_ratio_low",
    "clip_ratio": "loss.clip_ratio_low",
    "clip_lower": "loss.clip_ratio_low",
    "epsilon_high": "loss.clip_ratio_high",
    "clip_higher": "loss.clip_ratio_high",
    "clip_ratio_c": "loss.dual_clip",
    "loss_agg_mode": "loss.aggregation",
    "loss_type": "loss.aggregation",
    "masked_mean_axis": "loss.aggregation",
    "scale_rewards": "loss.normalize_std",
    "norm_adv_by_std_in_grpo": "loss.normalize_std",
    "beta": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "use_kl_loss": "loss.kl_coef",
    "tis_imp_ratio_cap": "loss.importance_cap",
    "vllm_importance_sampling_cap": "loss.importance_cap",
    "truncated_importance_sampling_ratio_cap": "loss.importance_cap",
    # optimizer
    "lr": "optimizer.learning_rate",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps",
    "grad_clip": "optimizer.max_grad_norm",
    "clip_grad": "optimizer.max_grad_norm",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "betas": "optimizer.beta1",
    "adam_epsilon": "optimizer.epsilon",
    # model, data and machine
    "model_name_or_path": "model.source",
    "model.path": "model.source",
    "dtype": "model.compute_dtype",
    "torch_dtype": "model.compute_dtype",
    "bf16": "model.compute_dtype",
    "gradient_checkpointing": "model.remat",
    "enable_gradient_checkpointing": "model.remat",
    "train_files": "data.source",
    "dataset_name": "data.source",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "model_revision": "model.revision",
    "stop_strings": "sampling.stop",
    "tensor_model_parallel_size": "parallel.tensor",
    "fsdp_size": "parallel.fsdp",
    "ulysses_sequence_parallel_size": "parallel.context",
    # evaluation, checkpoints, logs
    "val_kwargs.n": "eval.samples_per_prompt",
    "eval_steps": "eval.every_steps",
    "test_freq": "eval.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "report_to": "log.wandb",
}
"""A name of verl, TRL or open-instruct -> ours. Dotted ones win over their last part alone."""

UNITS = {
    "ppo_mini_batch_size": "both count prompts, that is whole groups: 32 x 16 responses is 512 responses an update",
    "num_mini_batches": "ours is the size of one update in groups, not the number of updates",
    "train_batch_size": "both count prompts, not responses",
    "gen_batch_size": "both count prompts, not responses",
    "ppo_micro_batch_size_per_gpu": "ours counts packed rows, and the updates do not depend on it",
    "per_device_train_batch_size": "ours counts packed rows, and the updates do not depend on it",
    "gradient_accumulation_steps": "accumulation follows from the rows of one update",
    "loss_agg_mode": "token-mean is token_mean, seq-mean-token-mean is sequence_mean",
    "loss_type": "dapo is token_mean, grpo is sequence_mean, dr_grpo is token_sum_norm",
    "clip_ratio": "set loss.clip_ratio_high too: the paper's differ",
    "epsilon": "that of the Adam denominator is optimizer.epsilon",
    "use_kl_loss": "a coefficient; 0 switches the reference policy off",
    "betas": "and optimizer.beta2, each a number",
    "warmup_ratio": "in steps, not as a share of the run",
    "bf16": "float32 or bfloat16",
    "dtype": "float32 or bfloat16",
    "torch_dtype": "float32 or bfloat16",
    "gradient_checkpointing": "none, full or dots",
    "enable_gradient_checkpointing": "none, full or dots",
    "report_to": "true or false; also log.tensorboard",
}
"""What else to know where an alias is not the same quantity, or is easily taken for another."""


def alias_of(key: str, known: Collection[str]) -> str | None:
    """The alias that `key` ends with, the longest first, if what it stands for is one of the `known` keys or
    their sections.

    >>> alias_of("actor_rollout_ref.rollout.n", ["batch.group_size"])
    'rollout.n'
    """
    places = {place for each in known for place in (each, each.rpartition(".")[0])}
    parts = key.lower().split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((ending for ending in endings if ALIASES.get(ending) in places), None)


def nearest_keys(key: str, known: Collection[str], *, count: int = 3, least: float = 1.1) -> list[str]:
    """The dotted keys most like `key`, best first; a right last part in the wrong section counts as much
    as a right section with a misspelt last part. Likeness goes to 2 (equal); under `least` a key is left out.

    >>> nearest_keys("temperature", ["sampling.temperature", "eval.temperature", "seed"])
    ['eval.temperature', 'sampling.temperature']
    """

    def likeness(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]).ratio()
        return whole + last

    scores = {candidate: likeness(candidate) for candidate in known}
    best = sorted(scores, key=lambda candidate: (-scores[candidate], candidate))[:count]
    return [candidate for candidate in best if scores[candidate] >= max(least, scores[best[0]] - 0.35)]


def unknown_key(key: str, known: Collection[str]) -> str:
    """What to say after "unknown key": what another library calls so, the nearest keys, or those there are."""
    alias = alias_of(key, known)
    if alias is not None:
        unit = f" ({UNITS[alias]})" if alias in UNITS else ""
        ours = f"`{alias}` of verl, TRL or open-instruct is `{ALIASES[alias]}` here{unit}"
        others = [near for near in nearest_keys(key, known, least=1.5) if near != ALIASES[alias]]
        return f"{ours}; or did you mean {_either(others)}?" if others else ours
    # Or a name inside a misspelt mapping.
    near = nearest_keys(key, known) or nearest_keys(key.rpartition(".")[0], known, least=1.5)
    if near:
        return f"did you mean {_either(near)}?"
    top = sorted({candidate.split(".", 1)[0] for candidate in known})
    return f"nothing here is called like it; the top level has {', '.join(top)}"


def _either(keys: Collection[str]) -> str:
    return " or ".join(f"`{key}`" for key in keys)
