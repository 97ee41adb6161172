"""The configurations of training, a warm start and an evaluation, a dataclass for each section. `data_schema` has the section `data`. Imports no jax.

Each key is defined once: its default, its rules (`keys.key`), and its documentation below it. Defaults are the paper's if the paper gives a value
(DAPO, https://arxiv.org/abs/2503.14476), with the equation or section. Checks raise `ConfigError` and never change a value.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from dapo_jax.config.data_schema import DataConfig, SourceConfig
from dapo_jax.config.keys import (
    AXIS,
    BETA,
    POSITIVE,
    ROUNDS,
    SEED,
    SIZE,
    STEPS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Range,
    key,
    refuse,
)
from dapo_jax.config.section import Section, due, entries, field_types, leaf_types, rules_by_key
from dapo_jax.hints import nearest


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, at="model"):
    """Which decoder, and how it computes."""

    source: str = key("preset:tiny", not_empty=True, aliases="model_name_or_path model.path")
    """`preset:NAME` (random weights), `shipped:NAME` (a model in the package), `hf:ORG/NAME` (from the Hugging Face hub), or a folder
    with config.json, tokenizer.json and model.safetensors, local or `gs://BUCKET/FOLDER` (extra `gcs`)."""
    revision: str = key("", aliases="model_revision")
    """Version of a model from the hub: a branch, a tag or a commit; empty: its main branch. A commit keeps a run repeatable."""
    tokenizer: str = "byte"
    """For a preset: `byte`, or `char:ALPHABET` with one token per character. A model folder has its own tokenizer."""
    compute_dtype: str = key(
        "float32",
        choices=["float32", "bfloat16"],
        aliases={"dtype torch_dtype bf16 fp16": "float32 or bfloat16"},
    )
    """Dtype of activations and matrix products: float32 or bfloat16. Master weights are always float32."""
    attention: str = key("auto", choices=["auto", "xla", "splash", "cudnn"], may_change=True)
    """Attention in training. xla runs everywhere; splash is a TPU kernel; cudnn is a kernel for NVIDIA GPUs and needs batch.packing=false
    and bfloat16. With splash and cudnn responses cannot share their prompt. auto: splash on a TPU, cudnn on a GPU if possible, else xla."""
    remat: str = key(
        "none",
        choices=["none", "full", "dots"],
        aliases={"gradient_checkpointing enable_gradient_checkpointing": "none, full or dots"},
        may_change=True,
    )
    """Activations of each layer that the backward pass recomputes: none, full, or dots (all except matrix products)."""


LORA_TARGETS = (
    "all",
    "attention",
    "mlp",
    *["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)
"""The linear layers that may have an adapter, by their names in transformers and PEFT, and names for several of them."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section, at="lora"):
    """Low-rank adapters: small trained matrices next to frozen ones (LoRA, https://arxiv.org/abs/2106.09685)."""

    rank: int = key(0, aliases={"lora_rank lora_r": "", "peft_config": "and lora.alpha, lora.targets"})
    """Rank of each adapter. About rank / width of the model is trained and saved. The model's weights are frozen in
    `model.compute_dtype`, and a KL penalty's reference policy is the model without adapters. 0: no adapters, all weights are trained."""
    alpha: float = key(32.0, range=POSITIVE, aliases="lora_alpha")
    """Scale of the adapters' output, which is multiplied by alpha / rank. One learning rate fits all ranks: about ten times the rate of full training."""
    targets: list[str] = key(default_factory=lambda: ["all"], aliases="target_modules lora_target_modules")
    """Linear layers with an adapter: all, attention, mlp, or names of transformers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""

    def check_together(self) -> None:
        if unknown := [name for name in self.targets if name not in LORA_TARGETS]:
            near = nearest(str(unknown[0]), LORA_TARGETS, least=0.0)[0]
            self.refuse("targets", f"a list of {', '.join(LORA_TARGETS)}", f"write {near}")
        if not self.targets:
            self.refuse("targets", "one linear layer or more", "write [all], or leave it out")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section, at="sampling"):
    """The sampling of responses."""

    temperature: float = key(1.0, range=TEMPERATURE)
    """Softmax temperature, of the sampling policy and of the trained policy alike. (Section 4.1)"""
    max_response_tokens: int = key(
        20480, range=SIZE, aliases="max_completion_length max_response_length max_new_tokens response_length"
    )
    """Hard length limit: expected length plus the soft overlong buffer. (Section 4.1)"""
    slots: int = key(256, range=SIZE, aliases="max_num_seqs", may_change=True)
    """Responses that each sampler decodes in parallel. There is one sampler per `parallel.sampler_hosts` processes."""
    steps_per_call: int = key(16, range=SIZE, may_change=True)
    """Decode steps in one call of the device. The host replaces finished responses between calls."""
    prefill_tokens: int = key(
        4096, range=SIZE, aliases="max_num_batched_tokens chunked_prefill_size", may_change=True
    )
    """Prompt tokens per prefill. Longer prompts are prefilled in chunks."""
    page_tokens: int = key(0, aliases="block_size page_size", may_change=True)
    """Tokens in a page of the KV cache. A response gets more pages as it grows, and responses to one prompt share its full pages.
    0: chosen for the platform; on CPU there are no pages, and each slot has room for the longest prompt and response."""
    cache_tokens: int = key(
        0,
        aliases={
            "vllm_gpu_memory_utilization gpu_memory_utilization": "tokens, not a share of the memory; 0 uses all free memory"
        },
        may_change=True,
    )
    """Tokens in the KV cache of a sampler, over all of its devices. If it is full, the response that started last is preempted, and later
    re-prefilled. 0: as many tokens as fit in the device's memory next to weights and state, which a run logs when it starts; on CPU enough for all slots."""
    cache_dtype: str = key(
        "", choices=["", "int8", "float8_e4m3fn"], aliases="kv_cache_dtype", may_change=True
    )
    """Dtype of keys and values. Eight bits, with a scale per token and head, hold twice the tokens of bfloat16 and are read twice as fast. Empty:
    model.compute_dtype. The sampler then differs more from the trainer, so training needs loss.importance_cap or another loss.correction."""
    weight_dtype: str = key("", choices=["", "int8"], aliases="quantization", may_change=True)
    """Dtype of the sampler's matrices: int8, with a scale per output. Empty: model.compute_dtype. Training with int8 needs loss.importance_cap or another loss.correction."""
    merge_lora: bool = key(False, may_change=True, only_with="lora.rank")
    """Add the adapters (`lora.rank`) to the sampler's weights. This saves their products at each token, needs memory for a second copy of the weights, and rounds
    differently from training. false: the sampler computes weights and adapters as training does."""
    batch_invariant: bool = key(False, may_change=True)
    """Make every bit of a log-probability independent of the other responses in the batch: of `sampling.slots` and of the number of processes. Eight slots of each
    device are decoded at a time and each prompt is prefilled alone, which is slower. false: results are equal up to rounding."""
    stop: list[str] = key(default_factory=list, aliases="stop_strings")
    """Strings that end a response, in evaluation too. It keeps the tokens that complete a string; graders get the text before it."""
    stop_token_ids: list[int] = key(default_factory=list)
    """Token ids that end a response, in addition to the tokenizer's end tokens."""

    def check_together(self) -> None:
        if "" in self.stop:
            remedy = "every text contains the empty string, so every response would end at once: remove it"
            self.refuse("stop", "strings with a character or more", remedy)


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(Section, at="reward.overlong"):
    """Soft overlong punishment (Eq. 13) and overlong filtering (Section 3.4)."""

    enabled: bool = key(True, aliases="overlong_buffer.enable")
    """Add the soft punishment to the rule reward."""
    buffer_tokens: int = key(4096, aliases="overlong_buffer.len")
    """L_cache: the tokens before the limit over which the penalty grows."""
    penalty_factor: float = key(1.0)
    """The full penalty, reached at the limit. (Eq. 13)"""
    filter_truncated: bool = key(False, aliases="mask_truncated_completions")
    """Overlong filtering: a truncated response keeps its reward, but none of its tokens enters the loss."""

    def check_together(self) -> None:
        if self.enabled and self.buffer_tokens < 1:
            remedy = "make it larger, or set reward.overlong.enabled=false"
            self.refuse("buffer_tokens", "1 or more for the soft punishment", remedy)


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    """One of `reward.graders`."""

    grader: str = key(not_empty=True)
    """The grader, named like `reward.grader`."""
    weight: float = key(1.0, range=Range("a number that is not 0", lambda v: v != 0))
    """Factor of its reward in the sum; negative for a penalty."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section, at="reward"):
    """Grading: the graders of responses, the rewards of their verdicts, and the overlong penalty."""

    grader: str = key("exact", not_empty=True, aliases="reward_funcs custom_reward_function")
    """A name in `dapo_jax.rewards.GRADERS` (exact, dapo, dapo_boxed, math, gsm8k), `reasoning_gym` (the task's own scorer),
    `module:function`, or `path/to/file.py:function`; with `trl:` or `verl:` before it a function written for that library."""
    graders: list[dict[str, Any]] = key(
        default_factory=list, aliases={"reward_weights": "each entry has its weight"}
    )
    """Several graders instead of `grader`: [{grader: math}, {grader: "my.py:brief", weight: 0.5}]. The reward is the sum of weight x reward.
    The first grader decides whether a response is correct, the others shape the reward."""
    answer_marker: str = "="
    """The exact grader compares the text after the last marker with the answer; empty: the whole response."""
    workers: int = key(2, may_change=True)
    """Worker processes per grader; 0: this process, without a time limit. Graders that only compare text (exact, dapo, dapo_boxed, gsm8k),
    reasoning_gym, async functions and functions passed from Python always run in this process."""
    timeout_s: float = key(10.0, range=POSITIVE)
    """Seconds for one call: a response, or a group if the function takes whole groups. A call that takes longer counts as wrong."""
    on_nonfinite: str = key("error", choices=["error", "lost"], may_change=True)
    """Action for a score that is NaN, infinite or beyond 1e30 in size: error, or lost (the response has no verdict and counts as wrong)."""
    correct: float = key(1.0, range=None)
    """Reward of a correct verdict without a score. (Section 2.4)"""
    incorrect: float = key(-1.0, range=None)
    """Reward of a wrong verdict without a score. (Section 2.4) Also the most that a response is worth if its grader returned no score (time, memory, a dead worker)."""
    overlong: OverlongConfig = key(default_factory=OverlongConfig, aliases="overlong_buffer")

    def check_together(self) -> None:
        if self.correct <= self.incorrect:
            remedy = "raise it: a right answer must be worth more than a wrong one"
            self.refuse("correct", f"more than reward.incorrect = {self.incorrect}", remedy)
        entries("reward.graders", self.graders, GraderConfig)
        if self.graders and self.grader != RewardConfig.grader:
            remedy = "reward.graders replaces it: put it into the list, or leave it out"
            self.refuse("grader", "its default, with reward.graders", remedy)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section, at="environment"):
    """Episodes of several turns: an environment answers the policy and gives the rewards."""

    source: str = key("", aliases="environment_factory env_class")
    """`guess` (guessing a number from \"higher\" and \"lower\"), or `module:name` or `path/to/file.py:name` of a class or function that is called without arguments
    and returns an environment. For other libraries: `trl:PLACE:Class` (`trl:PLACE:Class+function` with a reward function), `skyrl_gym:ID` or `skyrl_gym:PLACE:Class`, `openenv:URL`,
    `tinker:PLACE:Builder`; a PLACE is a module or a file. An environment replaces the graders of `reward`. Empty: a response is one turn, and graders give the rewards."""
    max_turns: int = key(8, range=SIZE, aliases="max_turns_per_episode max_assistant_turns")
    """Most turns of an episode; it is truncated after them."""
    turn_tokens: int = key(0)
    """Most tokens of a turn; 0: all that remain of the episode."""
    episode_tokens: int = key(0)
    """Most tokens of an episode, including the environment's; 0: `sampling.max_response_tokens`. A larger limit needs an environment that starts new
    contexts: each context has at most `data.max_prompt_tokens` + `sampling.max_response_tokens` tokens. Overlong rules use this limit."""
    timeout_s: float = key(30.0, range=POSITIVE)
    """Seconds for one answer of the environment. If it takes longer or raises, the episode is lost: it counts as wrong, and is worth as much as the worst episode of its group, but
    at most `reward.incorrect`."""
    workers: int = key(0, may_change=True)
    """Worker processes for the environment, per process of the run; 0: in the process itself. An environment that blocks, takes all memory or
    ends its worker costs only its own episode. A new worker replays the turns of its episodes."""
    credit: str = key("episode", choices=["episode", "turn"])
    """episode: all turns have the advantage of the episode's reward. turn: the advantage of a turn is its reward-to-go minus the mean over the group's episodes that reached this turn, divided by the standard deviation of the rewards of the group.
    If an environment compares rewards (`group_rewards`), the compared reward replaces the rewards of the turns and follows the last turn."""


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig(Section, at="dynamic_sampling"):
    """Sample until enough groups are neither all right nor all wrong (Eq. 11, Algorithm 1)."""

    enabled: bool = key(True, aliases="filter_groups.enable active_sampling filter_zero_std_samples")
    """false: one wave with as many prompts as a step trains on, including groups without signal."""
    prompts_per_wave: int = key(0, aliases={"gen_batch_size": "both count prompts, not responses"})
    """Prompts sampled in one wave; 0: three times `batch.prompts_per_step`, as in the released recipe (1536 for 512). A run's config.yaml has the number."""
    max_waves: int = key(10, aliases="max_num_gen_batches")
    """Most waves of one step; the recipe's limit."""
    on_shortfall: str = key("error", choices=["error", "train_fewer"], may_change=True)
    """Action if `max_waves` gave too few groups: error, or train_fewer."""
    surplus: str = key("discard", choices=["discard", "carry"])
    """Informative groups that are not needed: discard (as released), or carry into the next step, which then needs fewer new ones."""
    metric: str = key("correct", choices=["correct", "score"], aliases="filter_groups.metric")
    """The criterion for an informative group: correct (verdicts; with several graders the first's) or score (numbers; with several graders their sum): a group is kept
    if they are not all equal. With score the terminal, the watchdogs and the best checkpoint use rewards, also if `enabled` is
    false; a number above 0 is a correct response only with correct."""

    def check_together(self) -> None:
        if self.enabled and self.max_waves < 1:
            remedy = "raise it, or set dynamic_sampling.enabled=false"
            self.refuse("max_waves", "1 or more for dynamic sampling", remedy)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section, at="rollout"):
    """Rollouts that continue from one step to the next (partial rollouts), by a clock of rounds that depends only on lengths and verdicts."""

    in_flight: int = key(0, aliases="max_concurrent_rollouts")
    """Responses in flight over the whole run, a multiple of `batch.group_size`. Finished responses are replaced at once, unfinished ones continue
    with the next step's weights, and surplus groups wait, so no step waits for its longest response. 0: waves, each sampled to its end."""
    round_tokens: int = key(256, range=SIZE)
    """Tokens that each response in flight samples in a round. At the end of a round finished responses are replaced, and a step may end."""
    answer_rounds: int = key(1, range=ROUNDS)
    """Rounds that graders and environments have to answer; other responses are sampled meanwhile. 0: sampling waits for the answer."""
    max_age_steps: int = key(0, aliases="max_staleness staleness_threshold max_off_policy_steps")
    """Bound on staleness, in steps. A step waits for groups in flight that began this many steps ago, and at most the groups of this many steps
    and one more are in progress. Training data is then at most twice as old and one step more, and hardly ever older than this. 0: no bound."""


@dataclass(frozen=True, kw_only=True)
class PackedRowsConfig(Section, at="batch"):
    """The rows of tokens that a training pass computes."""

    rows_per_microbatch: int = key(
        1,
        range=SIZE,
        aliases={
            "ppo_micro_batch_size_per_gpu per_device_train_batch_size": "ours counts packed rows, and the updates do not depend on it",
            "gradient_accumulation_steps": "accumulation follows from the rows of one update",
        },
        may_change=True,
    )
    """Packed rows in one forward and backward pass."""
    row_tokens: int = key(0, aliases="pack_length ppo_max_token_len_per_gpu", may_change=True)
    """Tokens in a packed row; 0: the longest prompt plus the longest response. In longer rows more responses share their prompt, which is then
    computed once; the cost of attention grows with the square of the row."""
    packing: bool = key(True, may_change=True)
    """true: several responses in a row; false: one."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(PackedRowsConfig):
    """The size of one step: prompts, responses and optimizer updates."""

    prompts_per_step: int = key(
        512,
        range=SIZE,
        aliases={
            "train_batch_size": "both count prompts, not responses",
            "num_unique_prompts_rollout": "",
            "generation_batch_size": "ours counts prompts: divide TRL's by num_generations",
            "steps_per_generation": "TRL samples per_device_train_batch_size x processes x steps_per_generation responses at a time: divide that by num_generations",
        },
    )
    """Groups that a step trains on. (Section 4.1)"""
    group_size: int = key(
        16, range=SIZE, aliases="num_generations num_samples_per_prompt_rollout rollout.n n"
    )
    """Responses to each prompt, G. (Section 4.1)"""
    groups_per_update: int = key(
        32,
        range=SIZE,
        aliases={
            "ppo_mini_batch_size": "both count prompts, that is whole groups: 32 x 16 responses is 512 responses an update",
            "num_mini_batches": "ours is the size of one update in groups, not the number of updates",
        },
    )
    """Groups in one optimizer update: 32 x 16 = 512 responses, 16 updates a step. (Section 4.1)"""

    def check_together(self) -> None:
        step, update = self.prompts_per_step, self.groups_per_update
        updates, rest = divmod(step, update)
        if rest:
            multiples = " or ".join(str(k * update) for k in (updates, updates + 1) if k)
            remedy = f"{step} = {updates} x {update} + {rest}: use {multiples}, or a batch.groups_per_update that divides {step}"
            self.refuse("prompts_per_step", f"a multiple of batch.groups_per_update = {update}", remedy)


class Correction(NamedTuple):
    """The importance weights of a run, with every key resolved: `TrainConfig.correction`."""

    kind: str
    """none, truncate, mask or mask_responses."""
    low: float
    """The smallest weight that is kept; 0: no bound."""
    high: float
    """The largest weight that is kept; for truncate the cap."""


IMPORTANCE_CAP = 2.0
"""The cap of truncate if `loss.importance_cap` is null."""

IMPORTANCE_RANGES = {"mask": (0.5, 2.0), "mask_responses": (0.99, 1.01)}
"""The bounds if `loss.importance_range` is empty."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section, at="loss"):
    """The options of `dapo_jax.dapo_loss`, and of its advantages, old log-probabilities and importance weights."""

    clip_ratio_low: float = key(
        0.2,
        range=Range("more than 0 and less than 1", lambda v: 0 < v < 1),
        aliases={
            "epsilon": "the epsilon in Adam's denominator is optimizer.epsilon",
            "clip_ratio": "set loss.clip_ratio_high too: the paper's differ",
            "clip_lower": "",
        },
    )
    """eps_low of Eq. 8."""
    clip_ratio_high: float = key(0.28, range=POSITIVE, aliases="epsilon_high clip_higher")
    """eps_high of Eq. 8; equal to `clip_ratio_low` it is the plain PPO clip."""
    dual_clip: float | None = key(
        None, range=Range("more than 1, or null (off)", lambda v: v > 1), aliases="clip_ratio_c delta"
    )
    """c of the dual clip: for a negative advantage the token loss is at most c |A|. None: off."""
    aggregation: str = key(
        "token_mean",
        choices=["token_mean", "prompt_mean", "sequence_mean", "token_sum_norm"],
        aliases={
            "loss_agg_mode": "token-mean is token_mean, seq-mean-token-mean is sequence_mean",
            "loss_type": "dapo is token_mean, grpo is sequence_mean, dr_grpo is token_sum_norm",
            "masked_mean_axis": "",
        },
    )
    """token_mean, prompt_mean, sequence_mean or token_sum_norm: see `dapo_jax.token_weights`."""
    normalize_std: bool = key(True, aliases="scale_rewards norm_adv_by_std_in_grpo")
    """Divide advantages by the group's standard deviation (Eq. 9)."""
    old_logprobs: str = key(
        "trainer",
        choices=["trainer", "sampler"],
        aliases={"bypass_mode bypass_old_logprob_for_rollout": "true is sampler"},
    )
    """pi_old of the ratio. trainer: recomputed with the weights at the start of the step; sampler: recorded while sampling, also by older weights."""
    correction: str = key(
        "auto",
        choices=["auto", "none", "truncate", "mask", "mask_responses"],
        aliases={
            "rollout_is": "token is truncate",
            "rollout_rs": "token is mask, geometric (seq_mean_k1) is mask_responses; both weigh the tokens that they keep",
            "rollout_is_mode": "mask or truncate",
            "tis": "truncate",
            "vllm_importance_sampling_correction": "truncate, or none",
            "vllm_importance_sampling_mode": "token_truncate is truncate, token_mask is mask; for whole responses there is mask_responses",
        },
    )
    """Importance weights for tokens sampled by older or rounded weights, from each token's ratio pi_old / pi_sampler. truncate: min(ratio, `importance_cap`).
    mask: the ratio, or 0 outside `importance_range`. mask_responses: the same with the ratio's geometric mean over the response, or over a context of an episode.
    auto: truncate if `rollout.in_flight` or `importance_cap` is set, else none; none with `old_logprobs: sampler`, whose ratio already corrects."""
    importance_cap: float | None = key(
        None,
        range=Range("1 or more, or null", lambda v: v >= 1),
        aliases="tis_imp_ratio_cap vllm_importance_sampling_cap truncated_importance_sampling_ratio_cap rollout_is_threshold vllm_importance_sampling_clip_max",
    )
    """The largest weight of truncate. If it is set, auto means truncate. None: 2."""
    importance_range: list[float] = key(
        default_factory=list,
        aliases={
            "rollout_rs_threshold rollout_rs_threshold_lower rollout_is_threshold_lower vllm_importance_sampling_clip_min": "a list of both bounds: [0.5, 2.0]"
        },
    )
    """The smallest and the largest weight that mask and mask_responses keep; a token or a response outside is left out of the loss.
    Empty: [0.5, 2.0] for mask, [0.99, 1.01] for mask_responses."""
    kl_coef: float = key(
        0.0,
        aliases={
            "beta kl_loss_coef": "",
            "use_kl_loss": "a coefficient; 0 switches the reference policy off",
        },
    )
    """Weight of the KL to the reference policy; 0: no reference policy is loaded. (Section 2.3)"""

    def check_together(self) -> None:
        low, high, kind = self.clip_ratio_low, self.clip_ratio_high, self.correction
        cap, bounds = self.importance_cap, self.importance_range
        if high < low:
            remedy = f"{high} < {low}: raise it, or lower loss.clip_ratio_low"
            self.refuse("clip_ratio_high", f"at least loss.clip_ratio_low = {low}", remedy)
        if self.old_logprobs == "sampler" and (cap is not None or kind not in ("auto", "none")):
            name, needs = ("importance_cap", "null") if cap is not None else ("correction", "auto or none")
            remedy = (
                "it uses pi_old / pi_sampler, which is 1 if pi_old is the sampler's, and the ratio of the loss already corrects: "
                "set loss.old_logprobs=trainer, or leave it out"
            )
            self.refuse(name, f"{needs} with loss.old_logprobs = 'sampler'", remedy)
        if cap is not None and kind not in ("auto", "truncate"):
            remedy = "it only caps the weights of truncate: set loss.correction=truncate, or leave it out"
            self.refuse("importance_cap", f"null with loss.correction = {kind!r}", remedy)
        if bounds and not (len(bounds) == 2 and 0 < bounds[0] <= 1 <= bounds[1]):
            needs = "two numbers: the first more than 0 and at most 1, the second 1 or more"
            self.refuse("importance_range", needs, "the weight 1 must be kept: write for example [0.5, 2.0]")
        if bounds and kind not in IMPORTANCE_RANGES:
            remedy = "it bounds the weights of mask and mask_responses: set loss.correction to one of them, or leave it out"
            self.refuse("importance_range", f"[] with loss.correction = {kind!r}", remedy)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, at="optimizer"):
    """AdamW on float32 master weights (Section 4.1)."""

    learning_rate: float = key(1e-6, range=POSITIVE, aliases="lr")
    """Constant learning rate after the warm-up. (Section 4.1)"""
    warmup_steps: int = key(
        20,
        aliases={"lr_warmup_steps": "", "warmup_ratio": "in steps, not as a share of the run"},
    )
    """Linear warm-up in rollout steps: step k, counted from 1, has k / warmup_steps of the rate."""
    beta1: float = key(
        0.9, range=BETA, aliases={"adam_beta1": "", "betas": "and optimizer.beta2, each a number"}
    )
    """Decay of the first moment; PyTorch's default."""
    beta2: float = key(0.999, range=BETA, aliases="adam_beta2")
    """Decay of the second moment; PyTorch's default."""
    epsilon: float = key(1e-8, range=POSITIVE, aliases="adam_epsilon")
    """Added to the root of the second moment."""
    weight_decay: float = key(0.1)
    """Decay of all parameters, times the learning rate; the released recipe's."""
    max_grad_norm: float = key(1.0, range=POSITIVE, aliases="grad_clip clip_grad clip_grad_norm")
    """A gradient with a larger norm is scaled down to it; the released recipe's."""
    offload: bool = key(False, may_change=True)
    """Keep the moments in the host's memory between updates. This saves 8 bytes per parameter on the devices, and transfers them twice per update."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section, at="eval"):
    """Evaluation on held-out prompts."""

    every_steps: int = key(10, aliases={"eval_steps test_freq": "", "eval_strategy": "a number of steps"})
    """Steps between evaluations; 0: only before the first and after the last step."""
    datasets: list[dict[str, Any]] = key(default_factory=list)
    """{source: aime_2024, path: ...} for each dataset, see `SourceConfig`; empty: `data.eval_split` of `data.source`."""
    prompts: int = key(0)
    """The first prompts of each dataset; 0: all."""
    samples_per_prompt: int = key(32, range=SIZE, aliases="val_kwargs.n num_generations_eval")
    """k of avg@k. (Section 4.1)"""
    temperature: float = key(1.0, range=TEMPERATURE)
    """Softmax temperature; 0: greedy. (Section 4.1)"""
    top_p: float = key(0.7, range=TOP_P)
    """Nucleus sampling: the smallest set of tokens with this share of the probability; 1: off. (Section 4.1)"""
    top_k: int = key(0, range=TOP_K)
    """Sample from this many of the most likely tokens; 0: off."""

    def check_together(self) -> None:
        parts = entries("eval.datasets", self.datasets, SourceConfig)
        for place, part in enumerate(parts):
            key = f"eval.datasets[{place}]"
            if part.source == "mixture":
                refuse(f"{key}.source", part.source, "one dataset", "write an entry for each dataset")
            if part.weight != 1:
                refuse(f"{key}.weight", part.weight, "nothing", "every prompt is evaluated: leave it out")
            if "/" in part.title or part.title.startswith("."):
                needs = "a name without '/' that does not begin with '.'"
                refuse(f"{key}.name", part.title, needs, "it names files, and metrics eval/NAME/...")
            if part.title in [each.title for each in parts[:place]]:
                refuse(f"{key}.name", part.title, "a unique name", "metrics have its name: write another")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, at="checkpoint"):
    """Checkpoints, which are written between steps."""

    every_steps: int = key(10, aliases={"save_steps save_freq": "", "save_strategy": "a number of steps"})
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = key(3, range=SIZE, aliases="save_total_limit")
    """Number of latest checkpoints to keep."""
    keep_best: bool = True
    """Also save and keep the checkpoint with the best avg@k on the first evaluation dataset; with dynamic_sampling.metric=score, the best mean reward there."""
    grace_s: float = key(25.0, range=POSITIVE)
    """Seconds that a run may take to save after a signal to stop (SIGTERM, SIGINT, SIGHUP); then it ends without saving."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section, at="log"):
    """Logs in addition to metrics.jsonl."""

    rollouts_every_steps: int = key(10, aliases="log_completions")
    """Write readable rollouts of four groups every this many steps, and in the first and the last step; 0: never."""
    profile_steps: list[int] = key(default_factory=list)
    """Steps whose trace for xprof is written to `run_dir/profile`; the first steps are mostly compilation."""
    tensorboard: bool = False
    """Write events for TensorBoard (extra `tensorboard`); not for a run in a bucket."""
    wandb: bool = key(False, aliases={"report_to": "true or false; also log.tensorboard"})
    """Log to Weights & Biases (extra `wandb`), in the project that WANDB_PROJECT names, or `dapo_jax`."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section, at="parallel"):
    """Sizes of the mesh axes; -1 (on one axis) is all devices that the other axes leave."""

    data: int = key(1, range=AXIS)
    """Groups of devices that each have a full copy of the parameters; rows are distributed over them."""
    fsdp: int = key(-1, range=AXIS, aliases="fsdp_size")
    """Devices over which parameters, moments and rows are sharded; the first axis to raise."""
    tensor: int = key(1, range=AXIS, aliases="tensor_model_parallel_size")
    """Devices over which heads, MLP and vocabulary are sharded; must divide the key heads, best inside a host."""
    context: int = key(1, range=SIZE, aliases="ulysses_sequence_parallel_size")
    """Devices over which a row of tokens is sharded, for long responses."""
    sampler_tensor: int = key(0, aliases="vllm_tensor_parallel_size")
    """Devices over which a sampler's weights are sharded; its slots are distributed over its other devices. 0: as `tensor`."""
    sampler_hosts: int = key(1, range=SIZE)
    """Processes that share a sampler; more than 1 only if the weights do not fit on the devices of one process."""

    def check_together(self) -> None:
        rest = [name for name in field_types(ParallelConfig) if getattr(self, name) == -1]
        if len(rest) > 1:
            needs = f"a size, as parallel.{rest[0]} is -1 too"
            self.refuse(rest[1], needs, "only one axis can take the devices that the others leave")


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Section, at="guard"):
    """The reaction to a sampler that differs from the trainer."""

    max_mismatch_kl: float | None = key(None)
    """Limit of KL(sampler || trainer), the metric `sync/sampler_trainer_kl`, in nats per token. null: no limit."""
    on_mismatch: str = key("warn", choices=["warn", "stop"])
    """Action above that limit: warn, or stop the run. `loss.correction` weighs tokens by pi_trainer / pi_sampler in every step."""

    def check_together(self) -> None:
        if self.on_mismatch == "stop" and self.max_mismatch_kl is None:
            self.refuse(
                "max_mismatch_kl", "a number for guard.on_mismatch = 'stop'", "write the limit, such as 0.01"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The keys that training and a warm start share."""

    run_dir: str = key(not_empty=True, aliases="output_dir default_local_dir", may_change=True)
    """Folder of the run: local, or `gs://BUCKET/FOLDER` (extra `gcs`)."""
    seed: int = key(0, range=SEED)
    """Seed of the order of prompts, of sampling, of shuffling, and of random weights."""
    steps: int = key(
        100,
        range=STEPS,
        aliases={
            "max_steps total_training_steps num_training_steps": "",
            "num_train_epochs total_epochs": "in steps: an epoch has prompts / batch.prompts_per_step of them, fewer with dynamic sampling",
        },
        may_change=True,
    )
    """Number of steps. A training step samples, grades, chooses groups and updates the weights; a step of a warm start is one update."""
    compilation_cache: str = key("~/.cache/dapo_jax/xla", may_change=True)
    """Folder, local or `gs://...`, of compiled programs that later runs reuse; empty: none."""
    model: ModelConfig = key(default_factory=ModelConfig)
    lora: LoraConfig = key(default_factory=LoraConfig, only_with="lora.rank")
    data: DataConfig = key(default_factory=DataConfig)
    sampling: SamplingConfig = key(default_factory=SamplingConfig)
    reward: RewardConfig = key(default_factory=RewardConfig)
    batch: PackedRowsConfig = key(default_factory=PackedRowsConfig)
    optimizer: OptimizerConfig = key(default_factory=OptimizerConfig)
    eval: EvalConfig = key(default_factory=EvalConfig, may_change=True)
    parallel: ParallelConfig = key(default_factory=ParallelConfig, may_change=True)

    def check_shared(self, response_tokens: int, response_key: str) -> None:
        """Checks keys without effect, attention and the length of rows; `response_key` is the key of the longest response."""
        self.check_effects()
        if self.model.attention == "cudnn":
            if self.batch.packing:
                remedy = "set batch.packing=false (one rollout per row), or model.attention=xla"
                self.refuse("model.attention", "rows with one rollout", remedy)
            if self.model.compute_dtype != "bfloat16":
                remedy = "set it to bfloat16, or model.attention=xla"
                self.refuse("model.compute_dtype", "bfloat16 for model.attention = 'cudnn'", remedy)
        row, prompt = self.batch.row_tokens, self.data.max_prompt_tokens
        if 0 < row < (longest := prompt + response_tokens):
            remedy = (
                f"{prompt} + {response_tokens} = {longest} > {row}: raise it to {longest}, or lower the two"
            )
            self.refuse("batch.row_tokens", f"0, or at least data.max_prompt_tokens + {response_key}", remedy)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """The complete configuration of a DAPO run."""

    stall_timeout_s: float = key(1800.0, may_change=True)
    """Seconds without progress (of data, sampling, graders, updates, files, other processes) after which the run ends with a report of every
    thread and process; longer than any compilation. 0: no limit."""
    environment: EnvironmentConfig = key(default_factory=EnvironmentConfig, only_with="environment.source")
    dynamic_sampling: DynamicSamplingConfig = key(
        default_factory=DynamicSamplingConfig, aliases="filter_groups"
    )
    rollout: RolloutConfig = key(default_factory=RolloutConfig)
    batch: BatchConfig = key(default_factory=BatchConfig)
    loss: LossConfig = key(default_factory=LossConfig)
    checkpoint: CheckpointConfig = key(default_factory=CheckpointConfig, may_change=True)
    log: LogConfig = key(default_factory=LogConfig, may_change=True)
    guard: GuardConfig = key(default_factory=GuardConfig, may_change=True)

    @property
    def episode_tokens(self) -> int:
        """Most tokens of a response, or of an episode."""
        return self.environment.episode_tokens or self.sampling.max_response_tokens

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: `batch.row_tokens`, or the longest possible rollout."""
        return self.batch.row_tokens or self.data.max_prompt_tokens + self.sampling.max_response_tokens

    @property
    def prompts_per_wave(self) -> int:
        """Prompts in one wave: `dynamic_sampling.prompts_per_wave`, or three times the prompts that a step trains on."""
        return self.dynamic_sampling.prompts_per_wave or 3 * self.batch.prompts_per_step

    @property
    def correction(self) -> Correction:
        """The importance weights of every step, with `auto` and defaults of `loss.correction` resolved."""
        loss, cap = self.loss, self.loss.importance_cap
        weighs = loss.old_logprobs == "trainer" and (self.rollout.in_flight or cap is not None)
        kind = ("truncate" if weighs else "none") if loss.correction == "auto" else loss.correction
        if kind == "none":
            return Correction(kind, 0.0, math.inf)
        if kind == "truncate":
            return Correction(kind, 0.0, IMPORTANCE_CAP if cap is None else cap)
        low, high = loss.importance_range or IMPORTANCE_RANGES[kind]
        return Correction(kind, low, high)

    def logs_rollouts(self, step: int) -> bool:
        """Returns True if rollouts of the step are written: in the first and the last step and every `log.rollouts_every_steps`."""
        every = self.log.rollouts_every_steps
        return every > 0 and (step in (1, self.steps) or due(step, every))

    def resolved(self) -> "TrainConfig":
        """Returns the configuration with `dynamic_sampling.prompts_per_wave` as a number, as a run saves and compares it."""
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
                remedy = (
                    "rounding makes the sampler another policy, which importance weights correct: set loss.importance_cap=2 or another "
                    "loss.correction, or leave it empty"
                )
                self.refuse(f"sampling.{name}", "loss.importance_cap or loss.correction for training", remedy)
        buffer, most = self.reward.overlong.buffer_tokens, self.episode_tokens
        if self.reward.overlong.enabled and buffer > most:
            name = (
                "environment.episode_tokens" if environment.episode_tokens else "sampling.max_response_tokens"
            )
            remedy = f"{buffer} > {most}: the paper's is a fifth of the limit, here {max(1, most // 5)}; or set reward.overlong.enabled=false"
            self.refuse("reward.overlong.buffer_tokens", f"at most {name} = {most}", remedy)
        if environment.source and self.parallel.sampler_hosts > 1:
            remedy = (
                "processes that share a sampler run its programs together, but the answers of an environment come at different times: "
                "set parallel.sampler_hosts=1"
            )
            self.refuse("environment.source", "a sampler for each process", remedy)
        if environment.source and (self.reward.graders or self.reward.grader != RewardConfig.grader):
            remedy = "the environment gives the rewards: leave reward.grader and reward.graders out"
            self.refuse("environment.source", "no reward.grader", remedy)
        if self.dynamic_sampling.enabled:
            self._check_waves()
        if self.rollout.in_flight:
            self._check_in_flight()

    def _check_waves(self) -> None:
        most, wave, step = self.dynamic_sampling.max_waves, self.prompts_per_wave, self.batch.prompts_per_step
        if most * wave < step:
            remedy = (
                f"{most} x {wave} = {most * wave} < {step}: raise max_waves to {-(-step // wave)} or more, or "
                "dynamic_sampling.prompts_per_wave"
            )
            needs = f"enough waves for batch.prompts_per_step = {step} groups"
            self.refuse("dynamic_sampling.max_waves", needs, remedy)
        if self.batch.group_size < 2:
            remedy = "a group of one is never mixed, so all would be dropped: raise it, or set dynamic_sampling.enabled=false"
            self.refuse("batch.group_size", "2 or more with dynamic sampling", remedy)

    def _check_in_flight(self) -> None:
        in_flight, group = self.rollout.in_flight, self.batch.group_size
        limit = self.sampling.max_response_tokens
        if self.loss.correction == "none" and self.loss.old_logprobs == "trainer":
            remedy = (
                "tokens in flight are sampled by older weights, and without the ratio to the policy that sampled them training collapses "
                "at an age of a few steps: leave it out, or set loss.old_logprobs=sampler"
            )
            needs = f"auto, truncate, mask or mask_responses with rollout.in_flight = {in_flight}"
            self.refuse("loss.correction", needs, remedy)
        if in_flight % group:
            needs = f"a multiple of batch.group_size = {group}, or 0 (waves)"
            remedy = f"groups of {group} responses are replaced whole: use {-(-in_flight // group) * group}"
            self.refuse("rollout.in_flight", needs, remedy)
        if self.rollout.round_tokens > limit:
            remedy = f"a response would end before its first round: use {limit} or less, such as {max(1, limit // 16)}"
            self.refuse("rollout.round_tokens", f"at most sampling.max_response_tokens = {limit}", remedy)


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig(PackedRowsConfig):
    """The size of one supervised update."""

    pairs_per_step: int = key(256, range=SIZE)
    """Demonstrations in one update, which is a step."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """A supervised warm start from prompt / response pairs."""

    max_response_tokens: int = key(64, range=SIZE)
    """Most tokens of a demonstration, including its end token; a longer one is an error."""
    batch: SftBatchConfig = key(default_factory=SftBatchConfig)

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: `batch.row_tokens`, or the longest possible pair."""
        return self.batch.row_tokens or self.data.max_prompt_tokens + self.max_response_tokens

    def check_together(self) -> None:
        self.check_shared(self.max_response_tokens, "max_response_tokens")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """The complete configuration of an evaluation, except the model."""

    seed: int = key(0, range=SEED)
    """Seed of sampling."""
    compilation_cache: str = "~/.cache/dapo_jax/xla"
    """Folder, local or `gs://...`, of compiled programs that later runs reuse; empty: none."""
    compute_dtype: str = key("float32", choices=["float32", "bfloat16"])
    """Dtype of activations and matrix products: float32 or bfloat16."""
    data: DataConfig = key(default_factory=DataConfig)
    sampling: SamplingConfig = key(default_factory=lambda: SamplingConfig(slots=32, max_response_tokens=1024))
    """Slots, limits and stops; temperature, top-p and top-k are in `eval`. The default is 32 slots of 1024 tokens,
    because the paper's 20,480 tokens fill the memory of small machines."""
    reward: RewardConfig = key(default_factory=RewardConfig)
    """The grader; the overlong penalty changes no score."""
    environment: EnvironmentConfig = key(default_factory=EnvironmentConfig)
    eval: EvalConfig = key(default_factory=EvalConfig)
    parallel: ParallelConfig = key(default_factory=ParallelConfig)


def evaluation_of(config: TrainConfig | SftConfig | EvaluateConfig) -> EvaluateConfig:
    """Returns the evaluation that a run with this configuration does while it trains."""
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
"""Keys, and beginnings of keys, that a resumed run may change: they affect only the order of sums, and the reaction to accidents."""
