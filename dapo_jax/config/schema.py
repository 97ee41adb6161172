"""Configuration dataclasses for training, supervised warm start and evaluation, one per section. The `data` section is in `data_schema`.

Each key is defined once, as a field with its default, its rules (`keys.key`), and its documentation below it. If the DAPO paper (https://arxiv.org/abs/2503.14476)
specifies a value, that value is the default, and the documentation names the equation or section. Checks raise `ConfigError` and never change a value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from dapo_jax.config.algorithms import ALGORITHMS, CLIP_RANGE, CLIPS, OBJECTIVES, OTHER_NAMES, SELECTIONS
from dapo_jax.config.data_schema import DataConfig, SourceConfig
from dapo_jax.config.keys import (
    POSITIVE,
    SEED,
    SIZE,
    Range,
    Rules,
    check_value,
    key,
    named,
    refuse,
)
from dapo_jax.config.section import Section, due, entries, field_types, leaf_types, rules_by_key
from dapo_jax.hints import nearest

DTYPES = ("float32", "bfloat16")
BETA = Range("0 or more and less than 1", lambda v: 0 <= v < 1)
TOP_P = Range("more than 0 and at most 1 (1: off)", lambda v: 0 < v <= 1)
TOP_K = Range("1 to 2**31 - 1, or 0 or -1 (both: off)", lambda v: -1 <= v < 2**31)
TEMPERATURE = Range("0 (greedy), or 0.001 to 1000", lambda v: v == 0 or 1e-3 <= v <= 1e3)
ROUNDS = Range("0 to 1000", lambda v: 0 <= v <= 1000)
AXIS = Range("1 or more devices, or -1 for all remaining devices", lambda v: v >= 1 or v == -1)
STEPS = Range("0 or more (0: evaluate only)", lambda v: v >= 0)
CLIP = Range("more than 0 and at most 1", lambda v: 0 < v <= 1)
DUAL_CLIP = Rules(range=Range("more than 1, or null (off)", lambda v: v > 1))


class SourceParts(NamedTuple):
    """The parts of a model's source."""

    place: str
    """The source without the other parts."""
    revision: str = ""
    """Branch, tag or commit of a model on the Hugging Face Hub."""
    checkpoint: str = "last"
    """The checkpoint of a run to load: last or best."""


def source_parts(source: str) -> SourceParts:
    """Splits `hf:ORG/NAME@COMMIT` and `RUN@best`.

    >>> source_parts("runs/mine@best")
    SourceParts(place='runs/mine', revision='', checkpoint='best')
    """
    place, _, part = source.rpartition("@")
    if place.startswith("hf:"):
        return SourceParts(place, revision=part)
    return SourceParts(place, checkpoint=part) if place and part in ("last", "best") else SourceParts(source)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, at="model"):
    """The model: its source, tokenizer, dtype, attention implementation and gradient checkpointing."""

    source: str = key("preset:tiny", not_empty=True, aliases="model_name_or_path model.path model_revision")
    """The model: `preset:NAME` (random weights), `shipped:NAME` (included in the package), `hf:ORG/NAME` or `hf:ORG/NAME@COMMIT` (from the Hugging Face Hub), or a model folder.
    COMMIT may also be a branch or a tag. A commit makes a run reproducible.
    A model folder contains config.json, tokenizer.json and model.safetensors. It is a local folder, or `gs://BUCKET/FOLDER` (needs the `gcs` extra). The folder of a run of `train` or `sft`
    is possible too. The run then starts with that run's weights and tokenizer, at step 0 and with a new optimizer state. `RUN` loads the latest checkpoint of a training run. `RUN@best` loads
    the saved checkpoint with the highest evaluation score (see `checkpoint.keep_best`)."""
    tokenizer: str = "byte"
    """Tokenizer for a preset: `byte`, or `char:ALPHABET`, which has one token per character of ALPHABET. All other models come with their own tokenizer."""
    compute_dtype: str = key("float32", choices=DTYPES, aliases="dtype torch_dtype bf16 fp16")
    """Dtype of activations and matrix products: float32 or bfloat16. Master weights are always float32."""
    attention: str = key("auto", choices=["auto", "xla", "splash", "cudnn"], may_change=True)
    """Attention implementation for training. xla runs on every platform. splash is a TPU kernel. With splash, packed responses cannot share the computation of their
    prompt. cudnn is an NVIDIA GPU kernel for bfloat16. auto selects splash on a TPU, cudnn on a GPU of compute capability 9.0 or higher in bfloat16 without parallel.context (if the
    model does not cap attention scores), and xla otherwise."""
    remat: str = key(
        "none",
        choices=["none", "full", "dots"],
        aliases="gradient_checkpointing enable_gradient_checkpointing",
        may_change=True,
    )
    """Gradient checkpointing: the backward pass recomputes activations instead of storing them. none recomputes nothing. full recomputes all activations. dots recomputes all activations except the results of matrix products."""

    @property
    def parts(self) -> SourceParts:
        """The parts of `source`."""
        return source_parts(self.source)


LORA_TARGETS = (
    "all", "attention", "mlp", "linear_attention", *(f"{p}_proj" for p in ["q", "k", "v", "o", "gate", "up", "down"]),
    "in_proj_z", "out_proj",
)  # fmt: skip
"""Allowed values in `lora.targets`: the names of linear layers in transformers and PEFT, and names for groups of these layers."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section, at="lora"):
    """Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): only small added matrices are trained, and the model's own weights are frozen."""

    rank: int = key(0, aliases="lora_rank lora_r peft_config use_peft")
    """Rank of each adapter. 0 means that there are no adapters and all weights are trained. With adapters, the model's own weights are frozen and stored in `model.compute_dtype`. Only the adapters are
    saved, and their size is about rank / width of the model's size. The reference policy for a KL penalty is then the model without adapters."""
    alpha: float = key(32.0, range=POSITIVE, aliases="lora_alpha")
    """Scale of the adapters: their output is multiplied by alpha / rank. Because of this scaling, one learning rate suits every rank: about ten times the learning rate for full training."""
    targets: list[str] = key(default_factory=lambda: ["all"], aliases="target_modules lora_target_modules")
    """Linear layers that get an adapter: all, attention, mlp, or single layers by their transformers names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj.
    Models with Gated DeltaNet also have linear_attention (in_proj_z and out_proj), which all does not include."""

    def check_together(self) -> None:
        if unknown := [name for name in self.targets if name not in LORA_TARGETS]:
            near = nearest(str(unknown[0]), LORA_TARGETS, least=0.0)[0]
            self.refuse("targets", f"a list of {', '.join(LORA_TARGETS)}", f"write {near}")
        if not self.targets:
            self.refuse("targets", "one linear layer or more", "write [all], or leave it out")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section, at="sampling"):
    """Sampling of responses."""

    temperature: float = key(1.0, range=TEMPERATURE)
    """Softmax temperature for sampling, and for log-probabilities in training. (Section 4.1)"""
    max_response_tokens: int = key(
        20480, range=SIZE, aliases="max_completion_length max_response_length max_new_tokens response_length"
    )
    """Maximum number of tokens per response. The default is the expected maximum length plus the soft overlong buffer. (Section 4.1)"""
    slots: int = key(256, range=SIZE, aliases="max_num_seqs", may_change=True)
    """Number of responses that each sampler decodes in parallel. There is one sampler per `parallel.sampler_hosts` processes."""
    steps_per_call: int = key(16, range=SIZE, may_change=True)
    """Number of decoding steps per device call. Between calls, the host replaces finished responses with new ones."""
    prefill_tokens: int = key(
        4096, range=SIZE, aliases="max_num_batched_tokens chunked_prefill_size", may_change=True
    )
    """Maximum number of prompt tokens per prefill. Longer prompts are prefilled in chunks."""
    page_tokens: int = key(0, aliases="block_size page_size", may_change=True)
    """Number of tokens per page of the KV cache. A response is allocated more pages as it grows, and responses to the same prompt share the prompt's full pages.
    0 selects a default for the platform. On a single CPU, the default for up to 256 tokens per prompt and response is a cache without pages."""
    cache_tokens: int = key(0, aliases="vllm_gpu_memory_utilization gpu_memory_utilization", may_change=True)
    """Capacity of a sampler's KV cache in tokens, over all of the sampler's devices. If the cache is full, the most recently started response is preempted and later
    re-prefilled. Layers with a window keep fewer tokens. 0 means as many tokens as fit into device memory next to the weights and the training state. A run logs this number when it
    starts. On CPU, 0 means enough tokens for all slots."""
    cache_dtype: str = key(
        "", choices=["", "int8", "float8_e4m3fn"], aliases="kv_cache_dtype", may_change=True
    )
    """Dtype of cached keys and values. Defaults to model.compute_dtype. The 8-bit types use one scale per token and head. Compared with bfloat16, the cache stores twice as many
    tokens and is read twice as fast. The sampler's log-probabilities then differ more from the trainer's, so training needs loss.importance_range=[0,2] or another loss.correction."""
    weight_dtype: str = key("", choices=["", "int8"], aliases="quantization", may_change=True)
    """Dtype of the sampler's weight matrices. Defaults to model.compute_dtype. int8 uses one scale per output feature. Training then needs loss.importance_range=[0,2] or another loss.correction."""
    batch_invariant: bool = key(False, may_change=True)
    """Make log-probabilities bitwise independent of the other responses in the batch, of `sampling.slots` and of the number of processes. Each device then decodes eight
    slots at a time and prefills each prompt separately, which is slower. If false, log-probabilities depend on these three, but only by rounding."""
    stop: list[str] = key(default_factory=list, aliases="stop_strings")
    """Strings that end a response, in training and in evaluation. The response keeps the tokens of the stop string, but graders receive only the text before it."""
    stop_token_ids: list[int] = key(default_factory=list)
    """Token ids that end a response, in addition to the tokenizer's end tokens."""

    def check_together(self) -> None:
        if "" in self.stop:
            remedy = "every text contains the empty string, so every response would end at once: remove it"
            self.refuse("stop", "non-empty strings", remedy)


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(Section, at="reward.overlong"):
    """Soft overlong punishment (Eq. 13) and overlong filtering (Section 3.4)."""

    enabled: bool = key(True, aliases="overlong_buffer.enable")
    """Add the soft overlong punishment to the rule-based reward."""
    buffer_tokens: int = key(4096, aliases="overlong_buffer.len")
    """L_cache, the number of tokens before the length limit over which the penalty grows."""
    penalty_factor: float = key(1.0)
    """Maximum penalty, for responses at the length limit. (Eq. 13)"""
    filter_truncated: bool = key(False, aliases="mask_truncated_completions")
    """Overlong filtering: exclude the tokens of truncated responses from the loss. Their rewards still count in the statistics of their groups."""

    def check_together(self) -> None:
        if self.enabled and self.buffer_tokens < 1:
            remedy = "make it larger, or set reward.overlong.enabled=false"
            self.refuse("buffer_tokens", "1 or more for the soft punishment", remedy)


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    """One of several graders, with its weight."""

    grader: str = key(not_empty=True)
    """The grader, in the same form as a single `reward.grader`."""
    weight: float = key(1.0, range=Range("a number that is not 0", lambda v: v != 0))
    """Weight of this grader's reward in the sum of rewards. A negative weight turns the reward into a penalty."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section, at="reward"):
    """Grading of responses: the graders, the reward for each verdict, and the overlong penalty."""

    grader: str | list[dict[str, Any]] = key(
        "exact", not_empty=True, aliases="reward_funcs custom_reward_function reward_weights"
    )
    """The grader: a name in `dapo_jax.rewards.GRADERS` (exact, dapo, dapo_boxed, math, gsm8k, math_verify), `reasoning_gym` (the task's own scorer),
    `module:function`, `path/to/file.py:function`, or `judge:FILE.yaml` (a language model with an API). For a function written for TRL or verl, add the prefix `trl:` or `verl:`.
    Or a list of graders, for example [{grader: math}, {grader: "my.py:brief", weight: 0.5}]. The reward is then the weighted sum of the graders' rewards.
    Only the first grader decides whether a response is correct. The other graders only shape the reward. kimi_length is a length reward, which needs another grader before it."""
    answer_marker: str = "="
    """The exact grader compares the text after the last answer marker in the response with the reference answer. If the marker is empty, the grader compares the whole response."""
    workers: int = key(2, may_change=True)
    """Number of worker processes per grader. If 0, graders run in the main process, without a time limit. Graders that only compare text (exact, dapo, dapo_boxed, gsm8k),
    reasoning_gym, kimi_length, async functions and functions passed from Python always run in the main process."""
    timeout_s: float = key(10.0, range=POSITIVE)
    """Time limit in seconds for one grading call. A call grades one response, or a whole group if the function accepts groups. If a call takes longer, its responses count as wrong. Judges have their own limit."""
    correct: float = key(1.0, range=None)
    """Reward for a correct response if the grader returns no score. (Section 2.4)"""
    incorrect: float = key(-1.0, range=None)
    """Reward for a wrong response if the grader returns no score. (Section 2.4) If grading fails (time limit, memory, a dead worker), the reward is at most this value."""
    overlong: OverlongConfig = key(default_factory=OverlongConfig, aliases="overlong_buffer")

    def check_together(self) -> None:
        if self.correct <= self.incorrect:
            remedy = "raise it: a correct response must be worth more than a wrong one"
            self.refuse("correct", f"more than reward.incorrect = {self.incorrect}", remedy)
        if not isinstance(self.grader, str) and not self.graders:
            self.refuse("grader", "a grader", "write its name, or leave the key out")

    @property
    def graders(self) -> list[GraderConfig]:
        """The graders in a list. Empty for a single grader."""
        return [] if isinstance(self.grader, str) else entries("reward.grader", self.grader, GraderConfig)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section, at="environment"):
    """Multi-turn episodes, in which an environment responds to the policy and supplies the rewards."""

    source: str = key("", aliases="environment_factory env_class")
    """The environment. `guess` is a number-guessing game. `module:name` or `path/to/file.py:name` is a class or function that is called without arguments and returns an environment.
    Environments from other libraries have the forms `trl:PLACE:Class` (`trl:PLACE:Class+function` with a reward function), `skyrl_gym:ID` or `skyrl_gym:PLACE:Class`, `openenv:URL`, and
    `tinker:PLACE:Builder`. PLACE is a module or a file. An environment replaces the graders in `reward`. If empty, a response is a single turn, and graders supply the rewards."""
    max_turns: int = key(8, range=SIZE, aliases="max_turns_per_episode max_assistant_turns")
    """Maximum number of turns per episode. Longer episodes are truncated."""
    turn_tokens: int = key(0)
    """Maximum number of tokens per turn. 0 means that only the episode's limit applies."""
    episode_tokens: int = key(0)
    """Maximum number of tokens per episode, including the environment's tokens. 0 means `sampling.max_response_tokens`. A larger limit requires an environment that starts new contexts, because
    each context has at most `data.max_prompt_tokens` + `sampling.max_response_tokens` tokens. The overlong penalty and filter use this limit."""
    timeout_s: float = key(30.0, range=POSITIVE)
    """Time limit in seconds for one response from the environment. If the environment takes longer or raises an error, the episode is lost. A lost episode counts as wrong. Its reward
    is the lowest in its group, but at most `reward.incorrect`."""
    workers: int = key(0, may_change=True)
    """Number of worker processes for the environment, per training process. If 0, the environment runs in the training process. If an environment in a worker blocks, runs out of
    memory or exits, only its own episode is lost, because a new worker replays the turns of the other episodes."""
    credit: str = key("episode", choices=["episode", "turn"])
    """Credit assignment to turns. episode: all turns get the advantage of the episode's reward. turn: the advantage of a turn is (reward-to-go - mean) / std. The mean is over the group's episodes that reached
    this turn, and std is the standard deviation of the group's rewards. If an environment compares episodes (`group_rewards`), the reward from this comparison replaces the turn rewards, and is credited to the last turn."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig(Section, at="dynamic_sampling"):
    """Dynamic sampling: sample until enough groups are neither all correct nor all wrong (Eq. 11, Algorithm 1)."""

    enabled: bool = key(True, aliases="filter_groups.enable active_sampling filter_zero_std_samples")
    """Use dynamic sampling. If false, each step samples `batch.prompts_per_step` prompts in one wave, and trains on all of their groups, including groups without signal."""
    prompts_per_wave: int = key(0, aliases="gen_batch_size")
    """Number of prompts per wave. 0 means three times `batch.prompts_per_step`, as in the released recipe (1536 prompts for a step of 512). The run's config.yaml contains the resolved number."""
    max_waves: int = key(10, aliases="max_num_gen_batches")
    """Maximum number of waves per step. The default is the value in the released recipe."""
    on_shortfall: str = key("error", choices=["error", "train_fewer"], may_change=True)
    """Action if there are too few informative groups after `max_waves` waves: error, or train_fewer, which trains on the groups that were found."""
    surplus: str = key("discard", choices=["discard", "carry"])
    """Treatment of informative groups that a step does not need. discard drops them, as in the released recipe. carry keeps them for the next step, which then needs fewer new groups."""
    metric: str = key("correct", choices=["correct", "score"], aliases="filter_groups.metric")
    """Value that decides whether a group is informative. A group is kept if its responses do not all have the same value. correct: the verdict, from the first grader if there are several.
    If the grader returns a number, a response with a number above 0 counts as correct. score: the numeric score, summed over the graders if there are several. With score, the
    terminal, the watchdogs and the best checkpoint also use rewards instead of verdicts, even if `enabled` is false."""

    def check_together(self) -> None:
        if self.enabled and self.max_waves < 1:
            remedy = "raise it, or set dynamic_sampling.enabled=false"
            self.refuse("max_waves", "1 or more for dynamic sampling", remedy)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section, at="rollout"):
    """Partial rollouts, in which unfinished responses continue in the next step. A virtual clock schedules responses in rounds that depend only on lengths and verdicts, not on real time."""

    in_flight: int = key(0, aliases="max_concurrent_rollouts")
    """Total number of responses in flight over all processes, a multiple of `batch.group_size`. Each finished response is replaced, and unfinished responses continue with the
    next step's weights, so no step has to wait for a slow response. Surplus groups are kept for later steps. 0 means sampling in waves, in which every response is finished before training."""
    round_tokens: int = key(256, range=SIZE)
    """Number of tokens that are sampled per round for each response in flight. At the end of a round, finished responses are replaced, and the step may end."""
    answer_rounds: int = key(1, range=ROUNDS)
    """Number of rounds within which graders and environments must answer. Other responses are sampled meanwhile. If 0, sampling waits for each answer."""
    max_staleness: int = key(0, aliases="max_staleness staleness_threshold max_off_policy_steps")
    """Bound n on staleness, in steps. Each step waits for the groups in flight that started n steps earlier. No group starts while the unfinished and unused groups suffice for n + 1 steps.
    Training data is then rarely older than n steps, and never older than 2n + 1 steps. 0 means no bound."""
    routing_replay: str = key("sampler", choices=["off", "sampler"], aliases="enable_rollout_routing_replay")
    """The experts that the trainer uses for a token of a model with experts. sampler: the experts that the sampler chose, in all log-probabilities and updates of the policy (rollout
    routing replay, R3, https://arxiv.org/abs/2510.11370). off: the trainer's own choice, which rounding changes for some tokens. The record takes one byte per token, layer and
    chosen expert, in host memory, in checkpoints and between processes. Models without experts are not affected."""


@dataclass(frozen=True, kw_only=True)
class PackedRowsConfig(Section, at="batch"):
    """The packed rows of tokens that a training pass processes."""

    rows_per_microbatch: int = key(
        1,
        range=SIZE,
        aliases="ppo_micro_batch_size_per_gpu per_device_train_batch_size gradient_accumulation_steps",
        may_change=True,
    )
    """Number of packed rows per forward and backward pass."""
    row_tokens: int = key(0, aliases="pack_length ppo_max_token_len_per_gpu", may_change=True)
    """Number of tokens per packed row. 0 means the longest prompt plus the longest response. In longer rows, more responses can share a prompt, so that it is computed less often.
    However, the cost of attention grows with the square of the row length."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(PackedRowsConfig):
    """The size of a training step: prompts, responses and optimizer updates."""

    prompts_per_step: int = key(
        512,
        range=SIZE,
        aliases="train_batch_size num_unique_prompts_rollout generation_batch_size steps_per_generation",
    )
    """Number of prompts per step, each with one group of responses. (Section 4.1)"""
    group_size: int = key(
        16, range=SIZE, aliases="num_generations num_samples_per_prompt_rollout rollout.n n"
    )
    """Number of responses per prompt, G. (Section 4.1)"""
    groups_per_update: int = key(32, range=SIZE, aliases="ppo_mini_batch_size num_mini_batches")
    """Number of groups per optimizer update. With the defaults, an update has 32 x 16 = 512 responses, and a step has 16 updates. (Section 4.1)"""
    keep: int | dict[str, int] = key(0, choices=["shortest", "reward_per_token"])
    """Number of responses of each group to train on (GFPO, https://arxiv.org/abs/2508.09726). The others are dropped before advantages and dynamic sampling. 0 means all responses.
    The shortest responses are kept. {reward_per_token: 8} keeps the 8 responses with the highest reward per token."""

    def check_together(self) -> None:
        step, update, size = self.prompts_per_step, self.groups_per_update, self.group_size
        updates, rest = divmod(step, update)
        if rest:
            multiples = " or ".join(str(k * update) for k in (updates, updates + 1) if k)
            remedy = f"{step} = {updates} x {update} + {rest}: use {multiples}, or a batch.groups_per_update that divides {step}"
            self.refuse("prompts_per_step", f"a multiple of batch.groups_per_update = {update}", remedy)
        if self.kept and not 2 <= self.kept < size:
            remedy = "advantages compare at least two responses: change it, or raise batch.group_size"
            self.refuse("keep", f"2 to {size - 1} with batch.group_size = {size}, or 0 (all)", remedy)

    @property
    def kept(self) -> int:
        """Number of responses of each group to train on, or 0 for all."""
        return self.keep if isinstance(self.keep, int) else next(iter(self.keep.values()))

    @property
    def kept_by(self) -> str:
        """Which responses are kept: shortest or reward_per_token."""
        return "shortest" if isinstance(self.keep, int) else next(iter(self.keep))


class Correction(NamedTuple):
    """The importance weighting of a run, with all defaults resolved. See `TrainConfig.correction`."""

    kind: str
    """Kind of importance weights: none, truncate, mask, keep_responses or truncate_responses."""
    low: float
    """Smallest weight that is kept. 0 means no lower bound."""
    high: float
    """Largest weight that is kept, or for truncate, the cap."""


IMPORTANCE_RANGES = {
    "truncate": (0.0, 2.0), "truncate_responses": (0.0, 2.0), "mask": (0.5, 2.0), "keep_responses": (0.99, 1.01),
}  # fmt: skip
"""Smallest and largest weight for each correction, if `loss.importance_range` is empty."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section, at="loss"):
    """The loss, and the old log-probabilities, importance weights, token selection and KL penalty in it."""

    objective: str | dict[str, Any] = key(
        "clip",
        not_empty=True,
        aliases="loss_mode policy_loss_type loss_type importance_sampling_level clip_ratio_c delta",
    )
    """The loss function: a name in `dapo_jax.dapo.objectives.OBJECTIVES` (clip, gspo, gspo_token, gmpo, cispo, sapo, dppo, vespo, reinforce, dro, topr, kl_cov), `module:function`,
    or `path/to/file.py:function`. clip is the loss of the paper, `dapo_jax.dapo_loss`. `algorithm: NAME` sets the objective and all keys that belong to it (see algorithms.md).
    Options are the objective's keyword parameters that have a default. Write them below the name, for example {cispo: {cap: 5}} or {clip: {dual_clip: 10}}. The clip ratios are keys of their own."""
    clip_ratio_low: float = key(CLIP_RANGE[0], range=CLIP, aliases="epsilon clip_ratio clip_lower")
    """Lower clip range, eps_low in Eq. 8."""
    clip_ratio_high: float = key(CLIP_RANGE[1], range=POSITIVE, aliases="epsilon_high clip_higher")
    """Upper clip range, eps_high in Eq. 8. With the same value as `clip_ratio_low`, this is the plain PPO clip."""
    aggregation: str = key(
        "token_mean",
        choices=["token_mean", "prompt_mean", "sequence_mean", "token_sum_norm", "sequence_sum"],
        aliases="loss_agg_mode masked_mean_axis",
    )
    """How token losses are averaged: token_mean, prompt_mean, sequence_mean, token_sum_norm or sequence_sum. See `dapo_jax.token_weights`."""
    old_logprobs: str = key(
        "trainer", choices=["trainer", "sampler"], aliases="bypass_mode bypass_old_logprob_for_rollout"
    )
    """Source of pi_old in the policy ratio. trainer: recomputed with the weights at the start of the step. sampler: recorded during sampling, possibly with older weights."""
    correction: str = key(
        "auto",
        choices=["auto", "none", "truncate", "mask", "keep_responses", "truncate_responses"],
        aliases="rollout_is rollout_rs rollout_is_mode tis vllm_importance_sampling_correction vllm_importance_sampling_mode",
    )
    """Importance weights that correct for tokens sampled with older or rounded weights. They are computed from each token's ratio pi_old / pi_sampler. truncate: min(ratio, C), where `importance_range` is [0, C].
    mask: the ratio, or 0 outside `importance_range`. keep_responses: the ratio, or 0 if the geometric mean of the ratios in the response is outside the range. truncate_responses:
    min(product of the ratios in the response, C) for all tokens of the response. In an episode with several contexts, each context counts as a response. auto: truncate if `rollout.in_flight` or `importance_range` is set, else none. With `old_logprobs: sampler`, auto means none, because the policy ratio of the loss already corrects for this."""
    importance_range: list[float] = key(
        default_factory=list,
        aliases="tis_imp_ratio_cap vllm_importance_sampling_cap truncated_importance_sampling_ratio_cap rollout_is_threshold vllm_importance_sampling_clip_max "
        "rollout_rs_threshold rollout_rs_threshold_lower rollout_is_threshold_lower vllm_importance_sampling_clip_min",
    )
    """Range of the ratio that mask keeps, or of the geometric mean that keep_responses keeps. Tokens or responses outside this range are excluded from the loss,
    but they count in the baseline and in the scale of the advantages, and in the mean over tokens. For truncate and truncate_responses, [0, C] sets the largest weight C.
    If empty, the range is [0, 2] for truncate and truncate_responses, [0.5, 2] for mask and [0.99, 1.01] for keep_responses."""
    drop_off_policy: float | None = key(None, aliases="off_policy_mask_threshold")
    """Exclude responses with a negative advantage whose mean log(pi_sampler / pi) over the tokens exceeds this limit, in nats per token (DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556). pi is the policy of the current update. null keeps all responses."""
    select: str | dict[str, Any] = key(
        "all", choices=[*SELECTIONS], aliases="top_entropy_quantile clip_cov_ratio kl_cov_ratio"
    )
    """Tokens of an update that enter the loss, selected once per step with the weights at its start. all: all tokens. high_entropy: the tokens with the highest entropy. low_covariance: all except random tokens among those with
    a high covariance of advantage and log-probability (Clip-Cov). high_covariance: the tokens that the objective kl_cov penalizes. low_second_moment: all except those with the largest log-ratio (M2PO).
    Write options below the name, for example {high_entropy: {frac: 0.2}}: frac for high_entropy and high_covariance, frac, low and high for low_covariance, limit for low_second_moment."""
    kl_coef: float = key(0.0, aliases="beta kl_loss_coef use_kl_loss")
    """Weight of the KL penalty against the reference policy. If 0, no reference policy is loaded. (Section 2.3)"""
    kl_estimator: str = key(
        "k3",
        choices=["k3", "k3_unbiased"],
        aliases="use_bias_correction_kl use_unbiased_kl kl_loss_type",
        only_with="loss.kl_coef",
    )
    """Estimator of the KL divergence. k3: e^d - 1 - d with d = log(pi_ref / pi). k3_unbiased: k3 times pi / pi_old, whose gradient is the gradient of the
    divergence (DeepSeek-V3.2)."""

    def check_together(self) -> None:
        low, high = self.clip_ratio_low, self.clip_ratio_high
        kind, bounds = self.correction, self.importance_range
        if high < low:
            remedy = f"{high} < {low}: raise it, or lower loss.clip_ratio_low"
            self.refuse("clip_ratio_high", f"at least loss.clip_ratio_low = {low}", remedy)
        if self.old_logprobs == "sampler" and (bounds or kind not in ("auto", "none")):
            name, needs = ("importance_range", "[]") if bounds else ("correction", "auto or none")
            remedy = "pi_old / pi_sampler is then 1, and the ratio of the loss already corrects: set loss.old_logprobs=trainer, or leave it out"
            self.refuse(name, f"{needs} with loss.old_logprobs = 'sampler'", remedy)
        if bounds and kind == "none":
            remedy = "there are no weights: set loss.correction=truncate, or leave it out"
            self.refuse("importance_range", "[] with loss.correction = 'none'", remedy)
        keeps = kind in ("mask", "keep_responses")
        if bounds and not (
            len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1] and keeps == (bounds[0] > 0)
        ):
            needs = f"two numbers with loss.correction = {kind!r}: {'more than 0 and at most 1' if keeps else '0'}, and 1 or more"
            remedy = f"the weight 1 must be kept: write for example {'[0.5, 2]' if keeps else '[0, 2], or set loss.correction=mask'}"
            self.refuse("importance_range", needs, remedy)
        self._check_objective()

    def _check_objective(self) -> None:
        """Checks the keys that depend on a built-in objective or selection. The options of other objectives are checked when the run is built."""
        (objective, options), (select, select_options) = named(self.objective), named(self.select)
        if ":" not in objective and objective not in OBJECTIVES:
            is_algorithm = objective in ALGORITHMS or objective in OTHER_NAMES
            near = nearest(objective, OBJECTIVES, least=0.0)[0]
            remedy = f"write algorithm: {objective}" if is_algorithm else f"did you mean {near}?"
            self.refuse("objective", f"{', '.join(OBJECTIVES)}, module:function or path.py:function", remedy)
        reads = OBJECTIVES.get(objective, CLIPS)
        for name, unset in zip(CLIPS, (CLIP_RANGE[:1], CLIP_RANGE[::-1]), strict=True):
            if name not in reads and getattr(self, name) not in unset:
                needs = f"{unset[0]} with loss.objective = {objective!r}, which does not read it"
                self.refuse(name, needs, "leave it out, or set loss.objective=clip")
        _check_options("loss.objective", objective, options, OBJECTIVES)
        _check_options("loss.select", select, select_options, SELECTIONS)
        if objective == "clip":
            check_value("loss.objective.clip.dual_clip", options.get("dual_clip"), float | None, DUAL_CLIP)
        if objective == "kl_cov" and select == "all":
            remedy = "it penalizes the selected tokens: set loss.select=high_covariance"
            self.refuse("select", "a selection with loss.objective = 'kl_cov'", remedy)
        if select == "high_covariance" and objective in OBJECTIVES and objective != "kl_cov":
            remedy = "training on these tokens alone would end exploration: set loss.objective=kl_cov, or loss.select=low_covariance"
            self.refuse("select", f"low_covariance with loss.objective = {objective!r}", remedy)


def _check_options(
    key: str, choice: str, options: dict[str, Any], known: Mapping[str, Sequence[str]]
) -> None:
    names = [name for name in known.get(choice, options) if name not in CLIPS]
    if unknown := next((name for name in options if name not in names), None):
        near = nearest(unknown, names, least=0.0) or ["none, so leave it out"]
        remedy = f"set loss.{unknown}" if unknown in CLIPS else f"the nearest option is {near[0]}"
        refuse(f"{key}.{choice}.{unknown}", options[unknown], f"an option of {choice}", remedy)


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(Section, at="advantage"):
    """Advantages, which are computed from the rewards of all groups of a step. The default is Eq. 9."""

    baseline: str = key(
        "group_mean",
        choices=["group_mean", "leave_one_out", "length_weighted", "none"],
        aliases="adv_estimator advantage_estimator",
    )
    """Value that is subtracted from a reward. group_mean: mean reward of the group. leave_one_out: mean reward of the other responses (RLOO). length_weighted: mean over
    the tokens of the group, so that long responses count more (OPO). none: 0. (Eq. 9)"""
    scale: str = key(
        "group_std",
        choices=["group_std", "group_mean", "batch_std", "whiten_tokens", "whiten_responses", "none"],
        aliases="scale_rewards norm_adv_by_std_in_grpo",
    )
    """How the difference is scaled. group_std: divided by the standard deviation of the group's rewards (Eq. 9). group_mean: divided by the group's mean reward (MaxRL). batch_std: divided by the standard
    deviation of all rewards of the step. whiten_tokens and whiten_responses: mean 0 and variance 1 over the tokens or the responses of the step. none: not scaled."""
    rewards: str = key("summed", choices=["summed", "apart"])
    """Treatment of several graders. summed: the advantage is computed from the sum of their rewards. apart: the reward of each grader is normalized within its group, and the weighted
    sum of the results is then scaled (GDPO, https://arxiv.org/abs/2601.05242)."""
    best_of: int = key(1, range=SIZE)
    """Train for the best of k responses (pass@k, https://arxiv.org/abs/2508.10751): the reward of a response becomes the expected maximum over this response and k - 1 others of its group."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Section, at="teacher"):
    """On-policy distillation: a teacher model scores the tokens that the policy sampled, and log(pi_teacher / pi_old) is the advantage of a token."""

    source: str = key("", aliases="teacher_model_name_or_path teacher_model_revision")
    """The teacher, in the same form as `model.source`. It must have the same tokenizer as the policy. If empty, there is no teacher."""
    coef: float = key(1.0, range=POSITIVE)
    """Factor of the teacher's advantages, or of the divergence from the teacher."""
    kl: str = key("sampled", choices=["sampled", "full"])
    """How to approach the teacher. `sampled`: by the advantages of the sampled tokens. `full`: by a term of the loss, the KL divergence from the policy to the teacher over the
    whole vocabulary at each token."""
    rewards: bool = key(False)
    """Add the advantages of the rewards to the teacher's advantages. If false, training responses are not graded, all groups are trained on, and graders are used only in evaluations."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, at="optimizer"):
    """The optimizer, on float32 master weights (Section 4.1)."""

    name: str = key("adamw", choices=["adamw", "muon"], aliases="optim")
    """adamw, or muon (https://kellerjordan.github.io/posts/muon/), which orthogonalizes the update of each weight matrix (also of each expert and
    router), and uses AdamW for all other parameters. Its updates have about the size of AdamW's, so the same learning rates are suitable. It stores one moment per element of a matrix instead of two."""
    learning_rate: float = key(1e-6, range=POSITIVE, aliases="lr")
    """Learning rate, which is constant after the warm-up. (Section 4.1)"""
    warmup_steps: int = key(20, aliases="lr_warmup_steps warmup_ratio")
    """Linear warm-up, in training steps: step k, counted from 1, uses k / warmup_steps of the learning rate."""
    beta1: float = key(0.9, range=BETA, aliases="adam_beta1 betas")
    """Decay rate of the first moment. The default is the same as in PyTorch. muon uses it only for parameters other than weight matrices, whose momentum is 0.95."""
    beta2: float = key(0.999, range=BETA, aliases="adam_beta2")
    """Decay rate of the second moment. The default is the same as in PyTorch."""
    epsilon: float = key(1e-8, range=POSITIVE, aliases="adam_epsilon")
    """Constant that is added to the square root of the second moment."""
    weight_decay: float = key(0.1)
    """Weight decay, applied to all parameters and multiplied by the learning rate. The default is the value in the released recipe."""
    max_grad_norm: float = key(1.0, range=POSITIVE, aliases="grad_clip clip_grad clip_grad_norm")
    """Maximum global norm of the gradient. A larger gradient is scaled down to this norm. The default is the value in the released recipe."""
    offload: bool = key(False, aliases="optimizer_offload param_offload", may_change=True)
    """Keep the optimizer moments in host memory between updates. This saves 8 bytes of device memory per parameter (4 in the matrices of muon), but transfers the moments twice per update."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section, at="eval"):
    """Evaluation on held-out prompts."""

    every_steps: int = key(10, aliases="eval_steps test_freq eval_strategy")
    """Number of steps between evaluations. If 0, the run evaluates only before the first and after the last step."""
    datasets: list[dict[str, Any]] = key(default_factory=list, aliases="val_files")
    """Evaluation datasets, each in the form {source: aime_2024, path: ...} (see `SourceConfig`). If empty, `data.eval_split` of `data.source` is used."""
    prompts: int = key(0)
    """Number of prompts to use, from the beginning of each dataset. 0 means all prompts."""
    samples_per_prompt: int = key(32, range=SIZE, aliases="val_kwargs.n num_generations_eval")
    """Number of responses per prompt, which is k in avg@k. (Section 4.1)"""
    temperature: float = key(1.0, range=TEMPERATURE, aliases="do_sample val_kwargs.temperature")
    """Softmax temperature. 0 means greedy decoding. (Section 4.1)"""
    top_p: float = key(0.7, range=TOP_P)
    """Nucleus sampling: sample from the smallest set of tokens whose total probability reaches this value. 1 means all tokens. (Section 4.1)"""
    top_k: int = key(0, range=TOP_K)
    """Top-k sampling: sample from this many of the most likely tokens. 0 means all tokens."""

    def check_together(self) -> None:
        parts = entries("eval.datasets", self.datasets, SourceConfig)
        for place, part in enumerate(parts):
            key = f"eval.datasets[{place}]"
            if part.source == "mixture":
                refuse(f"{key}.source", part.source, "one dataset", "write an entry for each dataset")
            if part.weight != 1:
                refuse(f"{key}.weight", part.weight, "no weight", "every prompt is evaluated: leave it out")
            if "/" in part.title or part.title.startswith("."):
                needs = "a name without '/' that does not begin with '.'"
                refuse(f"{key}.name", part.title, needs, "it names files, and metrics eval/NAME/...")
            if part.title in [each.title for each in parts[:place]]:
                refuse(f"{key}.name", part.title, "a unique name", "metrics have its name: write another")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, at="checkpoint"):
    """Checkpoints, which are written between steps."""

    every_steps: int = key(10, aliases="save_steps save_freq save_strategy")
    """Number of steps between checkpoints. If 0, the run saves only after the last step."""
    keep: int = key(3, range=SIZE, aliases="save_total_limit max_actor_ckpt_to_keep")
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Also save and keep the best checkpoint, by avg@k on the first evaluation dataset, or by mean reward on it if dynamic_sampling.metric=score."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section, at="log"):
    """Logs that are written in addition to metrics.jsonl."""

    rollouts_every_steps: int = key(10, aliases="log_completions rollout_data_dir validation_data_dir")
    """Number of steps between logs of readable rollouts. Each log contains four groups. The first and the last step are also logged. If 0, no rollouts are logged."""
    profile_steps: list[int] = key(default_factory=list)
    """Steps to profile. Their xprof traces are written to `run_dir/profile`. Do not profile the first steps, because they spend most of their time on compilation."""
    trackers: list[str] = key(default_factory=list, aliases="report_to logger")
    """Trackers that receive the metrics of each step. tensorboard writes events (needs the `tensorboard` extra; not in a bucket). wandb logs to Weights & Biases (needs the `wandb`
    extra); the environment variable WANDB_PROJECT sets the project, by default `dapo_jax`. `module:Class` or `path/to/file.py:Class` is a class of your own with the methods `log(step, metrics)` and `close()`."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section, at="parallel"):
    """Sizes of the mesh axes and of the samplers. One mesh axis may be -1, which means all remaining devices."""

    data: int = key(1, range=AXIS)
    """Data parallelism: number of device groups that each have a full copy of the parameters. Batch rows are distributed over the groups."""
    fsdp: int = key(-1, range=AXIS, aliases="fsdp_size")
    """Fully sharded data parallelism: number of devices over which parameters, optimizer moments and batch rows are sharded. Increase this axis before the others."""
    tensor: int = key(1, range=AXIS, aliases="tensor_model_parallel_size")
    """Tensor parallelism: number of devices over which attention heads, MLP and vocabulary are sharded. It must divide the number of key heads, and should not exceed the number of devices of one host."""
    context: int = key(1, range=SIZE, aliases="ulysses_sequence_parallel_size context_parallel_size")
    """Context parallelism: number of devices over which each row of tokens is sharded. Use it for long responses."""
    sampler_tensor: int = key(0, aliases="vllm_tensor_parallel_size rollout.tensor_model_parallel_size")
    """Number of devices over which a sampler's weights are sharded. The sampler's slots are distributed over groups of this many devices. 0 means the greatest common divisor of `tensor` and the sampler's number of devices."""
    sampler_hosts: int = key(1, range=SIZE)
    """Number of processes that share a sampler. Use more than 1 only if the weights do not fit on the devices of one process."""

    def check_together(self) -> None:
        rest = [name for name in field_types(ParallelConfig) if getattr(self, name) == -1]
        if len(rest) > 1:
            needs = f"a size, as parallel.{rest[0]} is -1 too"
            self.refuse(rest[1], needs, "only one axis can take the devices that the others leave")


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Section, at="guard"):
    """Reaction to a mismatch between the log-probabilities of sampler and trainer."""

    max_mismatch_kl: float | None = key(None)
    """Limit on KL(sampler || trainer), the metric `sync/sampler_trainer_kl`, in nats per token. A run stops if it exceeds this limit. null means no limit. To correct for a mismatch
    in every step, use `loss.correction`."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The keys that are shared by training and a supervised warm start."""

    run_dir: str = key(not_empty=True, aliases="output_dir default_local_dir", may_change=True)
    """Run folder: a local folder, or `gs://BUCKET/FOLDER` (needs the `gcs` extra)."""
    seed: int = key(0, range=SEED)
    """Random seed for the order of prompts, for sampling, for shuffling and for random weights."""
    steps: int = key(
        100,
        range=STEPS,
        aliases="max_steps total_training_steps num_training_steps num_train_epochs total_epochs",
        may_change=True,
    )
    """Number of steps. A training step samples and grades responses, selects groups and updates the weights. A warm-start step is one update."""
    model: ModelConfig = key(default_factory=ModelConfig)
    lora: LoraConfig = key(default_factory=LoraConfig, only_with="lora.rank")
    data: DataConfig = key(default_factory=DataConfig)
    sampling: SamplingConfig = key(default_factory=SamplingConfig)
    reward: RewardConfig = key(default_factory=RewardConfig)
    batch: PackedRowsConfig = key(default_factory=PackedRowsConfig)
    optimizer: OptimizerConfig = key(default_factory=OptimizerConfig)
    eval: EvalConfig = key(default_factory=EvalConfig, may_change=True)
    parallel: ParallelConfig = key(default_factory=ParallelConfig, may_change=True)

    def check_shared(self, response: int, response_key: str) -> None:
        """Checks that every changed key has an effect, and that attention and row length are compatible with the other keys. `response` is the maximum response length, and `response_key` its key."""
        self.check_effects()
        if self.model.attention == "cudnn" and self.model.compute_dtype != "bfloat16":
            remedy = "set it to bfloat16, or model.attention=xla"
            self.refuse("model.compute_dtype", "bfloat16 for model.attention = 'cudnn'", remedy)
        row, prompt = self.batch.row_tokens, self.data.max_prompt_tokens
        if 0 < row < (longest := prompt + response):
            remedy = f"{prompt} + {response} = {longest} > {row}: raise it to {longest}, or lower the two"
            self.refuse("batch.row_tokens", f"0, or at least data.max_prompt_tokens + {response_key}", remedy)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Complete configuration of a DAPO training run."""

    stall_timeout_s: float = key(1800.0, may_change=True)
    """Number of seconds without progress (in data, sampling, grading, updates, files or other processes) after which the run ends with a report on
    every thread and process. It must be longer than the longest compilation. 0 means no limit."""
    environment: EnvironmentConfig = key(default_factory=EnvironmentConfig, only_with="environment.source")
    dynamic_sampling: DynamicSamplingConfig = key(
        default_factory=DynamicSamplingConfig, aliases="filter_groups"
    )
    rollout: RolloutConfig = key(default_factory=RolloutConfig)
    batch: BatchConfig = key(default_factory=BatchConfig)
    advantage: AdvantageConfig = key(default_factory=AdvantageConfig)
    loss: LossConfig = key(default_factory=LossConfig)
    teacher: TeacherConfig = key(default_factory=TeacherConfig, only_with="teacher.source")
    checkpoint: CheckpointConfig = key(default_factory=CheckpointConfig, may_change=True)
    log: LogConfig = key(default_factory=LogConfig, may_change=True)
    guard: GuardConfig = key(default_factory=GuardConfig, may_change=True)

    @property
    def episode_tokens(self) -> int:
        """Maximum number of tokens per response, or per episode if there is an environment."""
        return self.environment.episode_tokens or self.sampling.max_response_tokens

    @property
    def row_tokens(self) -> int:
        """Number of tokens per packed row: `batch.row_tokens`, or the length of the longest possible rollout."""
        return self.batch.row_tokens or self.sequence_tokens

    @property
    def sequence_tokens(self) -> int:
        """Maximum number of tokens of a prompt and a response together."""
        return self.data.max_prompt_tokens + self.sampling.max_response_tokens

    @property
    def prompts_per_wave(self) -> int:
        """Number of prompts per wave: `dynamic_sampling.prompts_per_wave`, or three times `batch.prompts_per_step`."""
        return self.dynamic_sampling.prompts_per_wave or 3 * self.batch.prompts_per_step

    @property
    def learnt_metric(self) -> str:
        """`dynamic_sampling.metric`, or an empty text if advantages do not depend on rewards: with a teacher, unless `teacher.rewards` is set."""
        return self.dynamic_sampling.metric if self.teacher.rewards or not self.teacher.source else ""

    @property
    def correction(self) -> Correction:
        """The run's importance weighting, with `auto` and the default bounds resolved."""
        loss = self.loss
        weighs = loss.old_logprobs == "trainer" and (self.rollout.in_flight or loss.importance_range)
        kind = ("truncate" if weighs else "none") if loss.correction == "auto" else loss.correction
        if kind == "none":
            return Correction(kind, 0.0, math.inf)
        low, high = loss.importance_range or IMPORTANCE_RANGES[kind]
        return Correction(kind, low, high)

    def logs_rollouts(self, step: int) -> bool:
        """Returns whether the rollouts of this step are logged. They are logged in the first step, in the last step, and every `log.rollouts_every_steps` steps."""
        every = self.log.rollouts_every_steps
        return every > 0 and (step in (1, self.steps) or due(step, every))

    def resolved(self) -> "TrainConfig":
        """Returns the configuration to save and to compare on resume, in which `dynamic_sampling.prompts_per_wave` is resolved to a number."""
        dynamic = replace(self.dynamic_sampling, prompts_per_wave=self.prompts_per_wave)
        return replace(self, dynamic_sampling=dynamic)

    def check_together(self) -> None:
        sampling, environment, limit = self.sampling, self.environment, self.sampling.max_response_tokens
        self.check_shared(limit, "sampling.max_response_tokens")
        if sampling.temperature == 0:
            remedy = "all responses of a group would be equal: greedy is for eval.temperature only"
            self.refuse("sampling.temperature", "more than 0 for training", remedy)
        for name in ("cache_dtype", "weight_dtype"):
            if getattr(sampling, name) and self.correction.kind == "none":
                remedy = "a rounded sampler is another policy: set loss.importance_range=[0,2] or another loss.correction to correct for it, or leave it empty"
                self.refuse(f"sampling.{name}", "a loss.correction for training", remedy)
        buffer, most = self.reward.overlong.buffer_tokens, self.episode_tokens
        if self.reward.overlong.enabled and buffer > most:
            name = (
                "environment.episode_tokens" if environment.episode_tokens else "sampling.max_response_tokens"
            )
            remedy = f"{buffer} > {most}: the paper's is a fifth of the limit, here {max(1, most // 5)}; or set reward.overlong.enabled=false"
            self.refuse("reward.overlong.buffer_tokens", f"at most {name} = {most}", remedy)
        if environment.source and self.parallel.sampler_hosts > 1:
            remedy = "processes that share a sampler run its programs together, but environments do not answer together: set parallel.sampler_hosts=1"
            self.refuse("environment.source", "a sampler for each process", remedy)
        if environment.source and self.reward.grader != RewardConfig.grader:
            remedy = "the environment supplies the rewards: leave reward.grader out"
            self.refuse("environment.source", "no reward.grader", remedy)
        if self.dynamic_sampling.enabled:
            self._check_waves()
        if self.rollout.in_flight:
            self._check_in_flight()
        if named(self.loss.objective).name == "vespo" and self.correction.kind != "none":
            remedy = "it weighs whole responses itself: set loss.old_logprobs=sampler or loss.correction=none"
            refuse("loss.correction", self.correction.kind, "none with loss.objective = 'vespo'", remedy)
        self._check_advantages()
        if self.teacher.source:
            self._check_teacher()

    def _check_advantages(self) -> None:
        advantage, size = self.advantage, self.batch.kept or self.batch.group_size
        baseline, scale, most = advantage.baseline, advantage.scale, advantage.best_of
        if baseline != "none" and size == 1:
            remedy = "one response cannot be compared with others: set it to none, or raise batch.group_size"
            self.refuse("advantage.baseline", "none with batch.group_size = 1", remedy)
        if most > size:
            name = "batch.keep" if self.batch.kept else "batch.group_size"
            self.refuse("advantage.best_of", f"at most {name} = {size}", "lower it, or raise the other")
        for name, value, used in (("scale", scale, scale == "group_mean"), ("best_of", most, most > 1)):
            if used and self.reward.incorrect < 0:
                remedy = "negative rewards would turn the sign of advantages or enter the best of k: set reward.incorrect=0"
                self.refuse("reward.incorrect", f"0 or more with advantage.{name} = {value!r}", remedy)
        if advantage.rewards == "apart" and len(self.reward.graders) < 2:
            remedy = "write a list in reward.grader, or set it to summed"
            self.refuse("advantage.rewards", "two graders or more for 'apart'", remedy)
        by_turn = [("group_mean", each, "summed", 1) for each in ("group_std", "none")]
        if self.environment.credit == "turn" and (baseline, scale, advantage.rewards, most) not in by_turn:
            needs = "episode, unless advantage.baseline = 'group_mean', advantage.scale is 'group_std' or 'none', and best_of = 1"
            remedy = "other advantages are defined for whole episodes only: set it to episode"
            self.refuse("environment.credit", needs, remedy)

    def _check_teacher(self) -> None:
        if self.sampling.temperature != 1:
            remedy = "the teacher's log-probabilities are at temperature 1: set it to 1"
            self.refuse("sampling.temperature", "1 with teacher.source", remedy)
        taught = self.teacher.kl == "sampled" or not self.teacher.rewards
        if taught and named(self.loss.select).name in ("low_covariance", "high_covariance"):
            remedy = (
                "it would ignore the advantages of the teacher: set it to all, or choose another selection"
            )
            self.refuse("loss.select", "a selection without advantages with teacher.source", remedy)
        for name, by_reward, needs in (
            ("dynamic_sampling.enabled", self.dynamic_sampling.enabled, "false"),
            ("environment.credit", self.environment.credit == "turn", "episode"),
            ("advantage.rewards", self.advantage.rewards == "apart", "summed"),
            ("batch.keep", self.batch.kept_by == "reward_per_token", "a number"),
        ):
            if by_reward and not self.teacher.rewards:
                remedy = f"rewards are not learnt, and all groups are trained on: set it to {needs}, or teacher.rewards=true"
                self.refuse(name, f"{needs} with teacher.source", remedy)

    def _check_waves(self) -> None:
        most, wave, step = self.dynamic_sampling.max_waves, self.prompts_per_wave, self.batch.prompts_per_step
        if most * wave < step:
            remedy = f"{most} x {wave} = {most * wave} < {step}: raise it to {-(-step // wave)} or more, or raise dynamic_sampling.prompts_per_wave"
            needs = f"enough waves for batch.prompts_per_step = {step} groups"
            self.refuse("dynamic_sampling.max_waves", needs, remedy)
        if self.batch.group_size < 2:
            remedy = "a group with one response is never mixed, so every group would be dropped: raise it, or set dynamic_sampling.enabled=false"
            self.refuse("batch.group_size", "2 or more with dynamic sampling", remedy)

    def _check_in_flight(self) -> None:
        in_flight, group = self.rollout.in_flight, self.batch.group_size
        limit = self.sampling.max_response_tokens
        if self.loss.correction == "none" and self.loss.old_logprobs == "trainer":
            remedy = "without importance weights, training on tokens of older weights collapses: leave it out, or set loss.old_logprobs=sampler"
            needs = f"auto or importance weights with rollout.in_flight = {in_flight}"
            self.refuse("loss.correction", needs, remedy)
        if in_flight % group:
            needs = f"a multiple of batch.group_size = {group}, or 0 (waves)"
            remedy = f"whole groups of {group} responses are replaced: use {-(-in_flight // group) * group}"
            self.refuse("rollout.in_flight", needs, remedy)
        if self.rollout.round_tokens > limit:
            remedy = f"a response would end before its first round: use {limit} or less, such as {max(1, limit // 16)}"
            self.refuse("rollout.round_tokens", f"at most sampling.max_response_tokens = {limit}", remedy)


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig(PackedRowsConfig):
    """The size of a supervised update."""

    pairs_per_step: int = key(256, range=SIZE)
    """Number of prompt / response pairs per update. A step is one update."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """Complete configuration of a supervised warm start on prompt / response pairs."""

    max_response_tokens: int = key(64, range=SIZE)
    """Maximum number of tokens in a response, including the end token. A longer response is an error."""
    batch: SftBatchConfig = key(default_factory=SftBatchConfig)

    @property
    def row_tokens(self) -> int:
        """Number of tokens per packed row: `batch.row_tokens`, or the length of the longest possible pair."""
        return self.batch.row_tokens or self.sequence_tokens

    @property
    def sequence_tokens(self) -> int:
        """Maximum number of tokens of a prompt and a response together."""
        return self.data.max_prompt_tokens + self.max_response_tokens

    def check_together(self) -> None:
        self.check_shared(self.max_response_tokens, "max_response_tokens")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """Complete configuration of an evaluation. The model is chosen separately."""

    seed: int = key(0, range=SEED)
    """Random seed for sampling."""
    compute_dtype: str = key("float32", choices=DTYPES)
    """Dtype of activations and matrix products: float32 or bfloat16."""
    data: DataConfig = key(default_factory=DataConfig)
    sampling: SamplingConfig = key(default_factory=lambda: SamplingConfig(slots=32, max_response_tokens=1024))
    """Slots, length limits and stop strings. Temperature, top-p and top-k are in `eval`. The default is 32 slots and 1024 tokens per response,
    because the paper's 20,480 tokens would exceed the memory of small machines."""
    reward: RewardConfig = key(default_factory=RewardConfig)
    """The graders. The overlong penalty does not apply in an evaluation."""
    environment: EnvironmentConfig = key(default_factory=EnvironmentConfig)
    eval: EvalConfig = key(default_factory=EvalConfig)
    parallel: ParallelConfig = key(default_factory=ParallelConfig)


def evaluation_of(config: TrainConfig | SftConfig | EvaluateConfig) -> EvaluateConfig:
    """Returns the configuration that a run with `config` uses for its own evaluations."""
    if isinstance(config, EvaluateConfig):
        return config
    names = {field.name for field in fields(EvaluateConfig)} - {"compute_dtype"}
    shared = {name: value for name, value in vars(config).items() if name in names}
    return EvaluateConfig(compute_dtype=config.model.compute_dtype, **shared)


FREE_TO_CHANGE = tuple(
    name if name in leaf_types(TrainConfig) else f"{name}."
    for name, rules in rules_by_key(TrainConfig).items()
    if rules.may_change
)
"""Keys, or key prefixes, whose values may change when a run is resumed (`may_change`)."""
