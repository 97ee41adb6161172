"""Remedies for unknown keys: the equivalents of keys from verl, TRL and open-instruct, and the most similar keys."""

import re
from collections.abc import Collection
from difflib import SequenceMatcher

from dapo_jax.config.schema import TrainConfig
from dapo_jax.config.section import rules_by_key

ALIASES = {name: ours for ours, rules in rules_by_key(TrainConfig).items() for name in rules.aliases.split()}
"""Maps names in verl, TRL or open-instruct to our keys. If several names match, for example `rollout.n` and `n`, the longest is used."""

_NOTES = {
    "dtype torch_dtype bf16 fp16": "float32 or bfloat16",
    "gradient_checkpointing enable_gradient_checkpointing": "none, full or dots",
    "peft_config use_peft": "and lora.alpha, lora.targets",
    "vllm_gpu_memory_utilization gpu_memory_utilization": "tokens, not a share of the memory; 0 uses all free memory",
    "model_revision teacher_model_revision": "a part of the source: hf:ORG/NAME@COMMIT",
    "reward_weights": "a list, in which each entry has its weight",
    "gen_batch_size train_batch_size": "both count prompts, not responses",
    "ppo_micro_batch_size_per_gpu per_device_train_batch_size": "ours counts packed rows, and the updates do not depend on it",
    "gradient_accumulation_steps": "accumulation follows from the rows of one update",
    "generation_batch_size": "ours counts prompts: divide TRL's by num_generations",
    "steps_per_generation": "TRL samples per_device_train_batch_size x processes x steps_per_generation responses at a time: divide that by num_generations",
    "ppo_mini_batch_size": "both count prompts, that is whole groups: 32 x 16 responses is 512 responses an update",
    "num_mini_batches": "ours is the size of one update in groups, not the number of updates",
    "loss_mode policy_loss_type loss_type": "TRL's bnpo and dapo are clip, verl's vanilla too; `algorithm: NAME` also sets the keys that belong to it: grpo, dr_grpo, gspo, cispo, sapo, ...",
    "importance_sampling_level": "token is clip, sequence is gspo",
    "epsilon": "the epsilon in Adam's denominator is optimizer.epsilon",
    "clip_ratio": "set loss.clip_ratio_high too: the paper's differ",
    "loss_agg_mode": "token-mean is token_mean, seq-mean-token-mean is sequence_mean, seq-mean-token-sum is sequence_sum",
    "bypass_mode bypass_old_logprob_for_rollout": "true is sampler",
    "rollout_is": "token is truncate, sequence is truncate_responses",
    "rollout_rs": "token is mask, geometric (seq_mean_k1) is keep_responses; both weigh the tokens that they keep",
    "rollout_is_mode": "mask or truncate",
    "tis": "truncate",
    "vllm_importance_sampling_correction": "truncate, or none",
    "vllm_importance_sampling_mode": "token_truncate is truncate, token_mask is mask, sequence_truncate is truncate_responses; keep_responses masks whole responses",
    "rollout_rs_threshold rollout_rs_threshold_lower rollout_is_threshold_lower vllm_importance_sampling_clip_min": "a list of both bounds: [0.5, 2.0]",
    "top_entropy_quantile": "with its fraction, for example {high_entropy: {frac: 0.2}}",
    "clip_cov_ratio kl_cov_ratio": "the option frac, for example {low_covariance: {frac: 0.0002}}",
    "clip_ratio_c delta": "an option of clip: {clip: {dual_clip: 10}}",
    "tis_imp_ratio_cap vllm_importance_sampling_cap truncated_importance_sampling_ratio_cap rollout_is_threshold vllm_importance_sampling_clip_max": "a cap C is [0, C]",
    "use_kl_loss": "a coefficient; 0 switches the reference policy off",
    "use_bias_correction_kl use_unbiased_kl": "true is k3_unbiased",
    "kl_loss_type": "low_var_kl and k3 are k3",
    "adv_estimator advantage_estimator": "`algorithm: NAME` also sets the keys that belong to it: grpo, rloo, opo, reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo, max_rl",
    "scale_rewards norm_adv_by_std_in_grpo": "write true and group as group_std, batch as batch_std, false as none",
    "prompt_key reward_fn_key": "{prompt: FIELD, answer: FIELD}, for data.source=jsonl",
    "do_sample": "0 is greedy; responses to train on are always sampled",
    "optim": "adamw_torch is adamw",
    "warmup_ratio": "in steps, not as a share of the run",
    "lr_scheduler_type lr_decay_style": "cosine_with_min_lr is cosine with optimizer.end_factor, warmup_stable_decay and wsd are linear with optimizer.decay_steps, "
    "constant_with_warmup is constant; there are no restarts, no inverse_sqrt and no reduction on a plateau",
    "num_decay_steps": "in steps of the run, each of which may have several updates",
    "min_lr": "as a factor of the learning rate: min_lr / learning_rate",
    "betas": "and optimizer.beta2, each a number",
    "eval_strategy save_strategy": "a number of steps",
    "report_to logger": "a list, such as [wandb, tensorboard]",
    "num_train_epochs total_epochs": "in steps: an epoch has prompts / batch.prompts_per_step of them, fewer with dynamic sampling",
}
NOTES = {alias: note for aliases, note in _NOTES.items() for alias in aliases.split()}
"""Maps an alias to a note if its quantity differs from ours or could be confused with another quantity."""

_NO_KEY = {
    "num_iterations ppo_epochs": "each response is trained on once; for several updates per step, set `batch.groups_per_update` to less than "
    "`batch.prompts_per_step`",
    "use_vllm rollout.name rollout.mode enforce_eager free_cache_engine load_format enable_chunked_prefill hybrid_engine": "the library samples with its own engine, which is configured in `sampling`",
    "block_size page_size": "the number of tokens per page follows from the platform and the slots; `sampling.cache_tokens` is the size of the cache",
    "push_to_hub": "after the run, upload the folder `model` in `run_dir`, which has the Hugging Face layout: hf upload ORG/NAME RUN_DIR/model",
    "logging_steps logging_strategy logging_first_step": "metrics are logged in every step; `log.rollouts_every_steps` is for sampled responses",
    "resume_from_checkpoint resume_mode resume_from_path": "the command-line option --resume continues from the last checkpoint",
    "min_p repetition_penalty sampling.top_p sampling.top_k rollout.top_p rollout.top_k": "training samples from the full distribution, because "
    "the loss uses its probabilities; `eval.top_p` and `eval.top_k` are for evaluation",
    "eval_on_start val_before_train": "every run evaluates before its first step and after its last one; `eval.every_steps` adds evaluations in between",
    "entropy_coeff entropy_coef": "the loss has no entropy bonus; raise `loss.clip_ratio_high` to keep the entropy from falling",
    "project_name wandb_project": "the environment variable WANDB_PROJECT sets the Weights & Biases project",
    "chat_template_path": "the template is chat_template.jinja in the folder `model.source`",
    "filter_overlong_prompts truncation": "training always leaves out prompts longer than `data.max_prompt_tokens`, and never truncates",
    "packing use_dynamic_bsz use_remove_padding balance_batch": "rows are always packed, to `batch.row_tokens`",
    "pipeline_model_parallel_size expert_model_parallel_size": "the devices are split by `parallel.fsdp`, `parallel.tensor` and `parallel.context`",
    "use_kl_in_reward kl_penalty": "the KL to the reference policy is a term of the loss: `loss.kl_coef`",
    "n_gpus_per_node nnodes num_processes num_machines trainer.device strategy deepspeed fsdp_config": "a run uses all devices that JAX finds, "
    "and `parallel.fsdp` = -1 shards over all of them; CUDA_VISIBLE_DEVICES limits the GPUs, and each machine starts the same command",
    "custom_reward_function.path custom_reward_function.name reward_manager": "one value names both: `reward.grader` = verl:path/to/file.py:function",
    "run_name experiment_name": "the last part of `run_dir` is the run's name",
    "gamma lam critic_warmup": "there is no critic and no discount; `advantage.baseline` is the baseline",
    "trust_remote_code": "code in a model folder is never executed",
    "cache_dir": "the environment variable HF_HOME sets the folder for models from the Hugging Face Hub",
}
NO_KEY = {name: answer for names, answer in _NO_KEY.items() for name in names.split()}
"""Maps verl and TRL keys that have no equivalent here to remedies."""

_NO_KEY_PREFIXES = {"vllm_": NO_KEY["use_vllm"], "hub_": NO_KEY["push_to_hub"]}


def of_another_library(key: str, known: Collection[str]) -> str | None:
    """Returns the remedy for a key from verl, TRL or open-instruct, or None if there is no remedy that uses only keys in `known`.

    If several endings of a dotted name match, the longest match is used.

    >>> of_another_library("actor_rollout_ref.rollout.n", ["batch.group_size"])
    '`rollout.n` of verl, TRL or open-instruct is `batch.group_size` here'
    """
    parts = key.lower().split(".")
    endings = [".".join(parts[start:]) for start in range(len(parts))]
    places = {place for each in known for place in (each, each.rpartition(".")[0])}
    if alias := next((ending for ending in endings if ALIASES.get(ending) in places), None):
        unit = f" ({NOTES[alias]})" if alias in NOTES else ""
        ours = f"`{alias}` of verl, TRL or open-instruct is `{ALIASES[alias]}` here{unit}"
        others = [near for near in nearest_keys(key, known, least=1.5) if near != ALIASES[alias]]
        return f"{ours}; or did you mean {_either(others)}?" if others else ours
    same_start = (answer for start, answer in _NO_KEY_PREFIXES.items() if parts[-1].startswith(start))
    answer = next((NO_KEY[ending] for ending in endings if ending in NO_KEY), None) or next(same_start, None)
    if answer and set(re.findall("`([^`]+)`", answer)) <= places:
        return f"verl or TRL has this key, dapo_jax does not: {answer}"
    return None


def nearest_keys(key: str, known: Collection[str], *, least: float = 1.1) -> list[str]:
    """Returns up to three dotted keys that are most similar to `key`, best first.

    The similarity ranges from 0 to 2 (the same key). Keys with a similarity below `least` are left out. A correct name in the wrong section
    counts about as much as a misspelt name in the correct section.

    >>> nearest_keys("temperature", ["sampling.temperature", "eval.temperature", "seed"])
    ['eval.temperature', 'sampling.temperature']
    """

    def similarity(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, key.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]).ratio()
        return whole + last

    scores = {candidate: similarity(candidate) for candidate in known}
    best = sorted(scores, key=lambda candidate: (-scores[candidate], candidate))[:3]
    return [candidate for candidate in best if scores[candidate] >= max(least, scores[best[0]] - 0.35)]


def unknown_key(key: str, known: Collection[str]) -> str:
    """Returns the remedy for an unknown key: our equivalent of the key, the most similar keys, or all top-level names."""
    if answer := of_another_library(key, known):
        return answer
    # If no key is similar, the key may be inside a mapping whose name is misspelt.
    if near := nearest_keys(key, known) or nearest_keys(key.rpartition(".")[0], known, least=1.5):
        return f"did you mean {_either(near)}?"
    top = sorted({candidate.split(".", 1)[0] for candidate in known})
    return f"no key is similar; the top level has {', '.join(top)}"


def _either(keys: Collection[str]) -> str:
    return " or ".join(f"`{key}`" for key in keys)
