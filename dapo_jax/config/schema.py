"""The configuration of a training run, a dataclass for each section; `data_schema` has that of its data. Imports no jax.

A key stands here and nowhere else: its default, its rules (`keys.key`), and the text that users read below it. Defaults are the paper's where the paper
gives one (DAPO, https://arxiv.org/abs/2503.14476), each with its equation or section. Checks raise `ConfigError` with the arithmetic;
nothing here changes a value.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dapo_jax.config.data_schema import DataConfig, SourceConfig, check_source
from dapo_jax.config.keys import (
    AXIS,
    BETA,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    ROUNDS,
    SIZE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Range,
    key,
)
from dapo_jax.config.section import Section, due, entries, field_types, leaf_types, rules_by_key
from dapo_jax.config.values import refuse
from dapo_jax.nearest import nearest


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, at="model"):
    """Which decoder, and how it computes."""

    source: str = key("preset:tiny", not_empty=True, aliases=["model_name_or_path", "model.path"])
    """`preset:NAME` (random weights), `shipped:NAME` (a model that comes with the package), `hf:ORG/NAME` (from the
    Hugging Face hub), or a folder with config.json, tokenizer.json and model.safetensors, local or `gs://BUCKET/FOLDER` (extra `gcs`)."""
    revision: str = key("", aliases=["model_revision"])
    """Version of a model from the hub: a branch, a tag or a commit; empty: its main branch. A commit keeps a run repeatable."""
    cache_dir: str = ""
    """Where models from the hub are kept; empty: where huggingface_hub keeps them (HF_HOME)."""
    tokenizer: str = "byte"
    """For a preset: `byte`, or `char:ALPHABET` with one token for each character. A model folder brings its own."""
    compute_dtype: str = key(
        "float32",
        choices=["float32", "bfloat16"],
        aliases={
            "dtype": "float32 or bfloat16",
            "torch_dtype": "float32 or bfloat16",
            "bf16": "float32 or bfloat16",
            "fp16": "float32 or bfloat16",
        },
    )
    """Dtype of activations and matrix products: float32 or bfloat16. Master weights are always float32."""
    attention: str = key("auto", choices=["auto", "xla", "splash", "cudnn"], may_change=True)
    """In training. xla runs everywhere; splash is a TPU kernel, cudnn one for NVIDIA GPUs, which needs batch.packing=false and
    bfloat16; neither of the two lets responses share their prompt. auto: splash on a TPU, cudnn on a GPU where it can, else xla."""
    remat: str = key(
        "none",
        choices=["none", "full", "dots"],
        aliases={
            "gradient_checkpointing": "none, full or dots",
            "enable_gradient_checkpointing": "none, full or dots",
        },
        may_change=True,
    )
    """Recomputed by the backward pass in each layer: none, full, or dots (keeps matrix products)."""
    logprob_chunk_vocab: int = key(2048, range=SIZE, may_change=True)
    """Vocabulary entries whose logits exist at one time, for all tokens of a microbatch, when log-probabilities are computed."""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        if self.revision and not self.source.startswith("hf:"):
            refuse(
                "model.revision",
                self.revision,
                "a model.source of the form hf:ORG/NAME",
                f"{self.source!r} has no revisions: leave the key out",
            )


LORA_TARGETS = (
    "all",
    "attention",
    "mlp",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""The linear layers that may have an adapter, by the names of transformers and PEFT, and names for several of them."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section, at="lora"):
    """Low-rank adapters: small matrices beside frozen ones, which alone are trained (LoRA, https://arxiv.org/abs/2106.09685)."""

    rank: int = key(
        0,
        range=NOT_NEGATIVE,
        aliases={"lora_rank": "", "lora_r": "", "peft_config": "and lora.alpha, lora.targets"},
    )
    """The rank of each adapter. What is trained, and saved, is then about rank / width of the model; its weights are frozen in `model.compute_dtype`, and a KL penalty's reference
    policy is the model without adapters. 0: no adapters, all weights are trained."""
    alpha: float = key(32.0, range=POSITIVE, aliases=["lora_alpha"])
    """The scale of what adapters give, which is multiplied by alpha / rank, so that one learning rate does for all ranks: about ten times that of full training."""
    targets: list[str] = key(
        default_factory=lambda: ["all"], aliases=["target_modules", "lora_target_modules"]
    )
    """The linear layers that have one: all, attention, mlp, or names of transformers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        if unknown := [name for name in self.targets if name not in LORA_TARGETS]:
            near = nearest(str(unknown[0]), LORA_TARGETS, least=0.0)[0]
            refuse("lora.targets", self.targets, f"a list of {', '.join(LORA_TARGETS)}", f"write {near}")
        if not self.targets:
            refuse("lora.targets", self.targets, "one linear layer or more", "write [all], or leave it out")
        if not self.rank and self.targets != ["all"]:
            remedy = "without a rank there are no adapters: set lora.rank=16, or leave the targets out"
            refuse("lora.targets", self.targets, "a lora.rank of 1 or more", remedy)
        if not self.rank and self.alpha != LoraConfig.alpha:
            remedy = "without a rank there are no adapters: set lora.rank=16, or leave it out"
            refuse("lora.alpha", self.alpha, "a lora.rank of 1 or more", remedy)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section, at="sampling"):
    """The sampling of responses for training."""

    temperature: float = key(1.0, range=TEMPERATURE)
    """Softmax temperature, of the policy that samples and of the one that is trained alike. (Section 4.1)"""
    top_p: float = key(1.0, range=TOP_P)
    """Nucleus sampling; in training it must be 1 (off), since the loss takes the ratio to the whole distribution."""
    top_k: int = key(0, range=TOP_K)
    """Sampling from the likeliest tokens alone; in training it must be off, for the same reason as `top_p`."""
    max_response_tokens: int = key(
        20480,
        range=SIZE,
        aliases=["max_completion_length", "max_response_length", "max_new_tokens", "response_length"],
    )
    """Hard length limit: expected length plus the soft overlong buffer. (Section 4.1)"""
    slots: int = key(256, range=SIZE, aliases=["max_num_seqs"], may_change=True)
    """Responses decoded side by side, by each sampler: there is one for every `parallel.sampler_hosts` processes."""
    steps_per_call: int = key(16, range=SIZE, may_change=True)
    """Decode steps on the device between two looks of the host."""
    prefill_tokens: int = key(
        4096, range=SIZE, aliases=["max_num_batched_tokens", "chunked_prefill_size"], may_change=True
    )
    """Prompt tokens per prefill. A longer prompt is prefilled in parts."""
    page_tokens: int = key(0, range=NOT_NEGATIVE, aliases=["block_size", "page_size"], may_change=True)
    """Tokens of a page of the key/value cache: a response takes pages as it grows, and the responses to a prompt share its full ones.
    0: what suits the platform; on CPU that is no pages, each slot has room for the longest prompt and response."""
    cache_tokens: int = key(
        0,
        range=NOT_NEGATIVE,
        aliases={
            "vllm_gpu_memory_utilization": "tokens, not a share of the memory; 0 takes what is free",
            "gpu_memory_utilization": "tokens, not a share of the memory; 0 takes what is free",
        },
        may_change=True,
    )
    """Tokens that the key/value cache of a sampler holds, over all of its devices. When it is full, the response that started last gives way and is read again later.
    0: as many as fit in the device's memory beside the run's weights and state, which a run says at its start; on CPU as many as all slots may come to."""
    cache_dtype: str = key(
        "", choices=["", "int8", "float8_e4m3fn"], aliases=["kv_cache_dtype"], may_change=True
    )
    """Dtype of keys and values: eight bits, with a scale for each token and head, hold twice the tokens of bfloat16 and read twice as fast. Empty: model.compute_dtype.
    What samples then differs more from what is trained, so training with it needs loss.importance_cap or another loss.correction."""
    weight_dtype: str = key("", choices=["", "int8"], aliases=["quantization"], may_change=True)
    """Dtype of the sampler's matrices: int8, with a scale for each output. Empty: model.compute_dtype. Training with it needs loss.importance_cap or another loss.correction."""
    merge_lora: bool = key(False, may_change=True)
    """Sample with adapters added to the weights (`lora.rank`), which saves their products at each token, takes memory for a second copy of the weights, and rounds otherwise than training
    does. false: the sampler computes weights and adapters as training does."""
    batch_invariant: bool = key(False, may_change=True)
    """Sample so that no bit of a log-probability depends on what is sampled beside it: not on `sampling.slots`, nor on how many processes share a run. Eight slots of each device are then
    decoded at a time and each prompt is read alone, which is slower. false: they are equal to rounding, and so is what is trained."""
    stop: list[str] = key(default_factory=list, aliases=["stop_strings"])
    """Strings that end a response. It keeps the tokens up to the one that completes a string; graders see the text
    before it. Evaluation stops there too."""
    stop_token_ids: list[int] = key(default_factory=list)
    """Ids that end a response besides the tokenizer's end tokens."""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        if "" in self.stop:
            remedy = "an empty string is in every text, so every response would end at once: remove it"
            refuse("sampling.stop", self.stop, "strings with a character or more", remedy)
        if any(token < 0 for token in self.stop_token_ids):
            refuse(
                "sampling.stop_token_ids",
                self.stop_token_ids,
                "ids of 0 or more",
                "write the tokenizer's ids",
            )


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(Section, at="reward.overlong"):
    """Soft overlong punishment (Eq. 13) and overlong filtering (Section 3.4)."""

    enabled: bool = key(True, aliases=["overlong_buffer.enable"])
    """Add the soft punishment to the rule reward."""
    buffer_tokens: int = key(4096, range=NOT_NEGATIVE, aliases=["overlong_buffer.len"])
    """L_cache: the last stretch before the limit in which the penalty grows."""
    penalty_factor: float = key(1.0, range=NOT_NEGATIVE)
    """The whole penalty, reached at the limit. (Eq. 13)"""
    filter_truncated: bool = key(False, aliases=["mask_truncated_completions"])
    """Overlong filtering: a truncated response keeps its reward but none of its tokens enters the loss."""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        if self.enabled and self.buffer_tokens < 1:
            remedy = "make it larger, or set reward.overlong.enabled=false"
            refuse(
                "reward.overlong.buffer_tokens",
                self.buffer_tokens,
                "1 or more for the soft punishment",
                remedy,
            )


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    """One of `reward.graders`."""

    grader: str = key(not_empty=True)
    """The grader, named like `reward.grader`."""
    weight: float = key(1.0, range=Range("a number that is not 0", lambda v: v != 0))
    """Factor of its reward in the sum; below 0 for what is to be avoided."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section, at="reward"):
    """Grading: the grader of responses, the rewards of its verdicts, and the overlong penalty."""

    grader: str = key("exact", not_empty=True, aliases=["reward_funcs", "custom_reward_function"])
    """A name in `dapo_jax.rewards.GRADERS` (exact, dapo, dapo_boxed, math, gsm8k), `reasoning_gym` (the task's own scorer),
    `module:function`, or `path/to/file.py:function`; `trl:` or `verl:` before it for a function written for these."""
    graders: list[dict[str, Any]] = key(
        default_factory=list, aliases={"reward_weights": "each entry has its weight"}
    )
    """Several instead of `grader`: [{grader: math}, {grader: "my.py:brief", weight: 0.5}]. The reward is the sum of weight x reward;
    the first alone says whether a response is correct, the others shape."""
    answer_marker: str = "="
    """The exact grader takes what follows the last marker as the answer; empty: the whole response."""
    workers: int = key(2, range=NOT_NEGATIVE, may_change=True)
    """Processes for each grader while sampling goes on; 0: this process, without a time limit. Graders that only compare text (exact,
    dapo, dapo_boxed, gsm8k), reasoning_gym, async functions and those passed from Python run in this process anyway."""
    async_calls: int = key(64, range=SIZE, may_change=True)
    """Calls of async functions that are under way at one time."""
    timeout_s: float = key(10.0, range=POSITIVE)
    """Seconds for one call: a response, or a group if the function takes one whole. What takes longer counts as wrong."""
    worker_memory_mb: int = key(2048, range=SIZE)
    """Memory in MiB that a worker may take beyond what the loaded grader needs; a response that takes more counts as wrong. (Linux)"""
    on_nonfinite: str = key("error", choices=["error", "lost"], may_change=True)
    """A score that is NaN, infinite or beyond 1e30 in size: error, or lost (that response has no verdict and counts as wrong)."""
    correct: float = 1.0
    """Reward of a correct verdict that has no score. (Section 2.4)"""
    incorrect: float = -1.0
    """Reward of a wrong one. (Section 2.4)"""
    lost: float | None = None
    """Reward, before its weight, where a grader that returns scores gave none (time, memory, a dead worker); never better than the worst
    that this grader paid for the prompt's other responses. None: `incorrect` (of a
    grader of negative weight `correct`), with the same bound."""
    overlong: OverlongConfig = key(default_factory=OverlongConfig, aliases=["overlong_buffer"])

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        if self.correct <= self.incorrect:
            needs = f"more than reward.incorrect = {self.incorrect}"
            refuse(
                "reward.correct",
                self.correct,
                needs,
                "raise it: a right answer must be worth more than a wrong one",
            )
        entries("reward.graders", self.graders, GraderConfig)
        if self.graders and self.grader != RewardConfig.grader:
            remedy = "reward.graders replaces it: put it into the list, or leave it out"
            refuse("reward.grader", self.grader, "no value beside reward.graders", remedy)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Section, at="environment"):
    """Episodes of several turns: an environment answers what the policy says, and gives the rewards."""

    source: str = key("", aliases=["environment_factory", "env_class"])
    """`guess` (a number, by \"higher\" and \"lower\"), `module:name`, or `path/to/file.py:name`: a class, or a function that makes an environment, called without arguments. One of
    another library: `trl:PLACE:Class` (`trl:PLACE:Class+function` with a reward function), `skyrl_gym:ID` or `skyrl_gym:PLACE:Class`, `openenv:URL`, `tinker:PLACE:Builder`; a PLACE is a module
    or a file. It replaces the graders of `reward`. Empty: a response is one turn, and graders say what it is worth."""
    max_turns: int = key(8, range=SIZE, aliases=["max_turns_per_episode", "max_assistant_turns"])
    """The most turns of an episode; one that is not over by then is cut off there."""
    turn_tokens: int = key(0, range=NOT_NEGATIVE)
    """The most tokens of a turn; 0: as many as are left."""
    episode_tokens: int = key(0, range=NOT_NEGATIVE)
    """The most tokens of an episode, what the environment appends among them; 0: `sampling.max_response_tokens`. More than `sampling.max_response_tokens` fit only where the environment begins
    contexts anew: each context is no longer than `data.max_prompt_tokens` + `sampling.max_response_tokens`. Overlong rules go by this limit."""
    timeout_s: float = key(30.0, range=POSITIVE)
    """Seconds for one answer of the environment. An episode whose environment takes longer, or raises, is lost: it counts as wrong, and is worth the worst of its group, but no more than
    `reward.incorrect` (or `reward.lost`)."""
    calls: int = key(64, range=SIZE, may_change=True)
    """Calls of the environment that are under way at one time in each process."""
    workers: int = key(0, range=NOT_NEGATIVE, may_change=True)
    """Processes for the environment in each process of the run; 0: that process itself. In workers an environment that blocks, takes all memory or ends its process costs only its own
    episode. A worker that is replaced is told the turns of its episodes again."""
    worker_memory_mb: int = key(2048, range=SIZE)
    """Memory in MiB that a worker may take beyond what the loaded environment needs; a call that takes more fails. (Linux)"""
    credit: str = key("episode", choices=["episode", "turn"])
    """episode: all turns have the advantage of the episode's reward. turn: the advantage of each turn is its reward-to-go, compared with the other episodes of the group that have this turn.
    Where an environment compares rewards (`group_rewards`), the compared reward replaces the rewards of the turns, and comes after the last one: each turn has all of it."""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        if self.source:
            return
        limits = ("max_turns", "turn_tokens", "episode_tokens", "timeout_s", "calls")
        for name in (*limits, "workers", "worker_memory_mb", "credit"):
            if getattr(self, name) != getattr(EnvironmentConfig, name):
                remedy = "without an environment there are no turns: name one, or leave it out"
                refuse(f"environment.{name}", getattr(self, name), "an environment.source", remedy)


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig(Section, at="dynamic_sampling"):
    """Keep sampling until enough groups are neither all right nor all wrong (Eq. 11, Algorithm 1)."""

    enabled: bool = key(True, aliases=["filter_groups.enable", "active_sampling", "filter_zero_std_samples"])
    """False: one wave of as many prompts as are trained on, flat groups among them."""
    prompts_per_wave: int = key(
        0, range=NOT_NEGATIVE, aliases={"gen_batch_size": "both count prompts, not responses"}
    )
    """Prompts drawn in one round; 0: three times `batch.prompts_per_step`, as in the released recipe (1536 for 512). A run's config.yaml
    has the number."""
    max_waves: int = key(10, range=NOT_NEGATIVE, aliases=["max_num_gen_batches"])
    """Waves of one step; the recipe's limit."""
    on_shortfall: str = key("error", choices=["error", "train_fewer"], may_change=True)
    """When `max_waves` gave too few groups: error, or train_fewer."""
    surplus: str = key("discard", choices=["discard", "carry"])
    """Informative groups beyond those needed: discard (as released), or carry into the next step, which then needs fewer new ones."""
    metric: str = key("correct", choices=["correct", "score"], aliases=["filter_groups.metric"])
    """The criterion that makes a group informative: correct (verdicts; of several graders the first's) or score (numbers, or the sum of several graders: a group is kept
    when they are not all equal). With score the terminal, the watchdogs and the best checkpoint go by rewards, also where `enabled` is
    false; a number above 0 is a correct response only with correct."""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        if self.enabled and self.max_waves < 1:
            remedy = "raise it, or set dynamic_sampling.enabled=false"
            refuse("dynamic_sampling.max_waves", self.max_waves, "1 or more for dynamic sampling", remedy)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section, at="rollout"):
    """Rollouts that go on from one step to the next, by a clock of rounds that depends on lengths and verdicts alone."""

    in_flight: int = key(0, range=NOT_NEGATIVE, aliases=["max_concurrent_rollouts"])
    """Responses in flight over the whole run, a multiple of `batch.group_size`. What has ended is replaced at once, what has not goes on
    with the next step's weights, and surplus groups wait: no step waits for its longest response. 0: waves, each sampled to its end."""
    round_tokens: int = key(256, range=SIZE)
    """Tokens that each response in flight draws in a round; at its end what has ended is replaced and a step may end."""
    verdict_rounds: int = key(1, range=ROUNDS)
    """Rounds that graders have before a group's reward is needed; sampling continues meanwhile. 0: sampling waits for the graders."""
    answer_rounds: int = key(1, range=ROUNDS)
    """Rounds that an environment has to answer a turn; other responses are sampled meanwhile. 0: sampling waits for the answer. Without `environment.source` it has no meaning."""
    max_age_steps: int = key(
        0, range=NOT_NEGATIVE, aliases=["max_staleness", "staleness_threshold", "max_off_policy_steps"]
    )
    """A step waits for groups in flight that began this many steps before, and no more groups are under way than so many steps and one more train on.
    What is trained on is then at most twice as old and one step more, and hardly ever older than this. 0: no bound."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section, at="batch"):
    """The size of one step: prompts, responses and optimizer updates."""

    prompts_per_step: int = key(
        512,
        range=SIZE,
        aliases={
            "train_batch_size": "both count prompts, not responses",
            "num_unique_prompts_rollout": "",
            "generation_batch_size": "ours counts prompts: divide TRL's by num_generations",
            "steps_per_generation": "TRL samples per_device_train_batch_size x processes x steps_per_generation responses at a time: "
            "divide that by num_generations",
        },
    )
    """Groups that a step trains on. (Section 4.1)"""
    group_size: int = key(
        16, range=SIZE, aliases=["num_generations", "num_samples_per_prompt_rollout", "rollout.n", "n"]
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
    rows_per_microbatch: int = key(
        1,
        range=SIZE,
        aliases={
            "ppo_micro_batch_size_per_gpu": "ours counts packed rows, and the updates do not depend on it",
            "per_device_train_batch_size": "ours counts packed rows, and the updates do not depend on it",
            "gradient_accumulation_steps": "accumulation follows from the rows of one update",
        },
        may_change=True,
    )
    """Packed rows in one forward and backward pass."""
    row_tokens: int = key(
        0,
        range=Range("1 or more, or 0 for the longest prompt and response", lambda v: v >= 0),
        aliases=["pack_length", "ppo_max_token_len_per_gpu"],
        may_change=True,
    )
    """Tokens in a packed row; 0: data.max_prompt_tokens + sampling.max_response_tokens. In longer rows more responses share
    their prompt, which is then computed once; attention costs the square of a row."""
    packing: bool = key(True, may_change=True)
    """Several rollouts in a row; false: one."""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        step, update = self.prompts_per_step, self.groups_per_update
        updates, rest = divmod(step, update)
        if rest:
            multiples = " or ".join(str(k * update) for k in (updates, updates + 1) if k)
            refuse(
                "batch.prompts_per_step",
                step,
                f"a multiple of batch.groups_per_update = {update}",
                f"{step} = {updates} x {update} + {rest}: use {multiples}, or a batch.groups_per_update that divides {step}",
            )


class Correction(NamedTuple):
    """The importance weights that a run trains with, every key resolved: `TrainConfig.correction`."""

    kind: str
    """none, truncate, mask or mask_responses."""
    low: float
    """The smallest weight that is kept; 0 where there is no such bound."""
    high: float
    """The largest; of truncate the cap."""


IMPORTANCE_CAP = 2.0
"""The cap of truncate where `loss.importance_cap` is null."""

IMPORTANCE_RANGES = {"mask": (0.5, 2.0), "mask_responses": (0.99, 1.01)}
"""The bounds of each where `loss.importance_range` is empty."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section, at="loss"):
    """The options of `dapo_jax.dapo_loss` and of what surrounds it."""

    clip_ratio_low: float = key(
        0.2,
        range=Range("more than 0 and less than 1", lambda v: 0 < v < 1),
        aliases={
            "epsilon": "that of the Adam denominator is optimizer.epsilon",
            "clip_ratio": "set loss.clip_ratio_high too: the paper's differ",
            "clip_lower": "",
        },
    )
    """eps_low of Eq. 8."""
    clip_ratio_high: float = key(0.28, range=POSITIVE, aliases=["epsilon_high", "clip_higher"])
    """eps_high of Eq. 8; equal to `clip_ratio_low` it is the plain PPO clip."""
    dual_clip: float | None = key(
        None, range=Range("more than 1, or null (off)", lambda v: v > 1), aliases=["clip_ratio_c", "delta"]
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
    normalize_std: bool = key(True, aliases=["scale_rewards", "norm_adv_by_std_in_grpo"])
    """Divide advantages by the group's standard deviation (Eq. 9)."""
    old_logprobs: str = key(
        "trainer",
        choices=["trainer", "sampler"],
        aliases={"bypass_mode": "true is sampler", "bypass_old_logprob_for_rollout": "true is sampler"},
    )
    """trainer: recomputed with the weights at the step's start; sampler: those recorded while sampling, for groups that were carried
    with older weights."""
    correction: str = key(
        "auto",
        choices=["auto", "none", "truncate", "mask", "mask_responses"],
        aliases={
            "rollout_is": "token is truncate",
            "rollout_rs": "token is mask, geometric (seq_mean_k1) is mask_responses; both weigh what they keep",
            "rollout_is_mode": "mask or truncate",
            "tis": "truncate",
            "vllm_importance_sampling_correction": "truncate, or none",
            "vllm_importance_sampling_mode": "token_truncate is truncate, token_mask is mask; for whole responses there is mask_responses",
        },
    )
    """Importance weights for tokens that earlier or rounded weights have drawn, of each token's ratio pi_old / pi_sampler: truncate (min(ratio, `importance_cap`)),
    mask (the ratio, or 0 outside `importance_range`), mask_responses (the geometric mean over the response, or 0; of an episode with several contexts over each context's part) or none.
    auto: truncate if `rollout.in_flight` or `importance_cap` is set, else none; none with `old_logprobs: sampler`, whose ratio corrects already."""
    importance_cap: float | None = key(
        None,
        range=Range("1 or more, or null", lambda v: v >= 1),
        aliases=[
            "tis_imp_ratio_cap",
            "vllm_importance_sampling_cap",
            "truncated_importance_sampling_ratio_cap",
            "rollout_is_threshold",
            "vllm_importance_sampling_clip_max",
        ],
    )
    """The largest weight of truncate, which auto becomes where this is set. None: 2."""
    importance_range: list[float] = key(
        default_factory=list,
        aliases={
            "rollout_rs_threshold": "a list of both bounds: [0.5, 2.0]",
            "rollout_rs_threshold_lower": "a list of both bounds: [0.5, 2.0]",
            "rollout_is_threshold_lower": "a list of both bounds: [0.5, 2.0]",
            "vllm_importance_sampling_clip_min": "a list of both bounds: [0.5, 2.0]",
        },
    )
    """The smallest and the largest weight that mask and mask_responses keep; a token, or a response, beyond them is left out.
    Empty: [0.5, 2.0] for mask, [0.99, 1.01] for mask_responses."""
    kl_coef: float = key(
        0.0,
        range=NOT_NEGATIVE,
        aliases={
            "beta": "",
            "kl_loss_coef": "",
            "use_kl_loss": "a coefficient; 0 switches the reference policy off",
        },
    )
    """Weight of the KL to the reference policy; 0 loads and runs no reference policy. (Section 2.3)"""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        if high < low:
            needs = f"at least loss.clip_ratio_low = {low}"
            refuse(
                "loss.clip_ratio_high", high, needs, f"{high} < {low}: raise it, or lower loss.clip_ratio_low"
            )
        self._check_importance()

    def _check_importance(self) -> None:
        kind, masks = self.correction, ("mask", "mask_responses")
        if self.importance_cap is not None and self.old_logprobs == "sampler":
            refuse(
                "loss.importance_cap",
                self.importance_cap,
                "null with loss.old_logprobs = 'sampler'",
                "it caps pi_old / pi_sampler, which is 1 everywhere when pi_old is the sampler's: "
                "set loss.old_logprobs=trainer or loss.importance_cap=null",
            )
        if kind not in ("auto", "none") and self.old_logprobs == "sampler":
            refuse(
                "loss.correction",
                kind,
                "auto or none with loss.old_logprobs = 'sampler'",
                "it weighs by pi_old / pi_sampler, which is 1 everywhere when pi_old is the sampler's: the ratio of the loss corrects "
                "already. Set loss.old_logprobs=trainer, or leave it out",
            )
        if self.importance_cap is not None and kind not in ("auto", "truncate"):
            refuse(
                "loss.importance_cap",
                self.importance_cap,
                f"null with loss.correction = {kind!r}",
                "it caps the weights of truncate alone: set loss.correction=truncate, or leave it out",
            )
        if (bounds := self.importance_range) and not (len(bounds) == 2 and 0 < bounds[0] <= 1 <= bounds[1]):
            refuse(
                "loss.importance_range",
                bounds,
                "two numbers: the first more than 0 and at most 1, the second 1 or more",
                "a weight of 1 says that nothing differs, so it is kept: write for example [0.5, 2.0]",
            )
        if bounds and kind not in masks:
            refuse(
                "loss.importance_range",
                bounds,
                f"[] with loss.correction = {kind!r}",
                "it bounds the weights of mask and mask_responses: set loss.correction to one of them, or leave it out",
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, at="optimizer"):
    """AdamW on float32 master weights (Section 4.1)."""

    learning_rate: float = key(1e-6, range=POSITIVE, aliases=["lr"])
    """After the warm-up; constant. (Section 4.1)"""
    warmup_steps: int = key(
        20,
        range=NOT_NEGATIVE,
        aliases={"lr_warmup_steps": "", "warmup_ratio": "in steps, not as a share of the run"},
    )
    """Linear warm-up in rollout steps: step k, from 1, runs at k / warmup_steps of the rate."""
    beta1: float = key(
        0.9, range=BETA, aliases={"adam_beta1": "", "betas": "and optimizer.beta2, each a number"}
    )
    """Decay of the first moment; PyTorch's default."""
    beta2: float = key(0.999, range=BETA, aliases=["adam_beta2"])
    """Decay of the second moment; PyTorch's default."""
    epsilon: float = key(1e-8, range=POSITIVE, aliases=["adam_epsilon"])
    """Added to the root of the second moment."""
    weight_decay: float = key(0.1, range=NOT_NEGATIVE)
    """Decay of all parameters, times the learning rate; the released recipe's."""
    max_grad_norm: float = key(1.0, range=POSITIVE, aliases=["grad_clip", "clip_grad", "clip_grad_norm"])
    """A gradient with a larger norm is scaled down to it; the released recipe's."""
    offload: bool = key(False, may_change=True)
    """Keep the moments in the host's memory between updates: 8 bytes a parameter less on the devices, which they cross twice an
    update."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section, at="eval"):
    """Evaluation on held-out prompts."""

    every_steps: int = key(
        10,
        range=NOT_NEGATIVE,
        aliases={"eval_steps": "", "test_freq": "", "eval_strategy": "a number of steps"},
    )
    """0: only before the first and after the last step."""
    datasets: list[dict[str, Any]] = key(default_factory=list)
    """{source: aime_2024, path: ...} for each dataset, see `SourceConfig`; empty: `data.eval_split` of `data.source`."""
    prompts: int = key(0, range=Range("1 or more, or 0 for the whole split", lambda v: v >= 0))
    """Prompts of each dataset, counted from the first; 0: all."""
    samples_per_prompt: int = key(32, range=SIZE, aliases=["val_kwargs.n", "num_generations_eval"])
    """k of avg@k. (Section 4.1)"""
    temperature: float = key(1.0, range=TEMPERATURE)
    """0: greedy. (Section 4.1)"""
    top_p: float = key(0.7, range=TOP_P)
    """The smallest set of tokens with this share of the probability; 1: off. (Section 4.1)"""
    top_k: int = key(0, range=TOP_K)
    """The most likely tokens, so many; 0: off."""

    def check_together(self) -> None:
        """Checks the datasets that are evaluated on."""
        parts = entries("eval.datasets", self.datasets, SourceConfig)
        titles = [part.title for part in parts]
        for place, part in enumerate(parts):
            key = f"eval.datasets[{place}]"
            check_source(key, part.source, part.source_options)
            if part.source == "mixture":
                refuse(f"{key}.source", part.source, "one dataset", "write an entry for each dataset")
            if part.weight != 1:
                refuse(f"{key}.weight", part.weight, "nothing", "every prompt is evaluated: leave it out")
            if "/" in part.title or part.title.startswith("."):
                needs = "a name without '/' that does not begin with '.'"
                refuse(f"{key}.name", part.title, needs, "files are named by it, and metrics eval/NAME/...")
            if part.title in titles[:place]:
                refuse(
                    f"{key}.name",
                    part.title,
                    "a name of its own",
                    "two datasets would share their metrics: write name: ... in the entry",
                )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section, at="checkpoint"):
    """Checkpoints stand at step boundaries."""

    every_steps: int = key(
        10,
        range=NOT_NEGATIVE,
        aliases={"save_steps": "", "save_freq": "", "save_strategy": "a number of steps"},
    )
    """0: only after the last step."""
    keep: int = key(3, range=SIZE, aliases=["save_total_limit"])
    """The number of last checkpoints that stay."""
    keep_best: bool = True
    """One is also saved, and stays, when avg@k on the first evaluation dataset is better than ever; with dynamic_sampling.metric=score,
    the mean reward there."""
    grace_s: float = key(25.0, range=POSITIVE)
    """Seconds that a run which is told to stop (SIGTERM, SIGINT, SIGHUP) may take to save; then it ends without."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section, at="log"):
    """Logs beside metrics.jsonl."""

    rollouts_every_steps: int = key(10, range=NOT_NEGATIVE, aliases=["log_completions"])
    """Write readable rollout samples every so many steps, and of the first and the last step; 0: never."""
    rollout_groups: int = key(4, range=SIZE)
    """Groups in one sample."""
    eval_responses: int = key(64, range=NOT_NEGATIVE)
    """Responses to each held-out dataset that an evaluation writes: of every problem the first, then the second, until there are so
    many; 0: none."""
    profile_steps: list[int] = key(default_factory=list)
    """Steps of which a trace for xprof is written to `run_dir/profile`; the first ones are mostly compilation."""
    tensorboard: bool = False
    """Events for TensorBoard too (extra `tensorboard`); not with a run in a bucket."""
    wandb: bool = key(False, aliases={"report_to": "true or false; also log.tensorboard"})
    """Weights & Biases too (extra `wandb`)."""
    wandb_project: str = "dapo_jax"
    """The project that the run is put into there."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section, at="parallel"):
    """Sizes of the mesh axes; -1 (on one axis) takes the devices that the others leave."""

    data: int = key(1, range=AXIS)
    """Devices with a whole copy of the parameters each, over which rows are spread."""
    fsdp: int = key(-1, range=AXIS, aliases=["fsdp_size"])
    """Devices over which parameters, moments and rows are split; the first to raise."""
    tensor: int = key(1, range=AXIS, aliases=["tensor_model_parallel_size"])
    """Devices over which heads, MLP and vocabulary are split; must divide the key heads, best inside a host."""
    context: int = key(1, range=SIZE, aliases=["ulysses_sequence_parallel_size"])
    """Devices over which a row of tokens is split, for long responses."""
    sampler_tensor: int = key(
        0,
        range=Range("1 or more, or 0 for the size of parallel.tensor", lambda v: v >= 0),
        aliases=["vllm_tensor_parallel_size"],
    )
    """Devices over which a sampler's weights are split; its slots are spread over its other devices. 0: as `tensor`."""
    sampler_hosts: int = key(1, range=SIZE)
    """Processes that share a sampler; more than 1 only for weights that do not fit the devices of one."""

    def check_together(self) -> None:
        """Checks what its values say about each other."""
        rest = [f"parallel.{name}" for name in field_types(ParallelConfig) if getattr(self, name) == -1]
        if len(rest) > 1:
            refuse(
                rest[1],
                -1,
                f"a size, as {rest[0]} is -1 too",
                "only one axis can take the devices that the others leave",
            )


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Section, at="guard"):
    """Reactions to numbers that are not finite, and to a sampler that differs from the trainer."""

    max_skipped_updates: int = key(3, range=NOT_NEGATIVE)
    """An update with a loss, gradient, advantage or log-probability that is not finite is skipped. More than so many in a row stop
    the run; 0: the first does."""
    post_mortems: int = key(5, range=NOT_NEGATIVE)
    """The number of skipped updates of which a run writes `run_dir/post_mortem/step_..._update_...`: the batch, what was not finite, the
    responses as text. 0: none."""
    max_mismatch_kl: float | None = key(None, range=Range("0 or more, or null (no limit)", lambda v: v >= 0))
    """Most that KL(sampler || trainer) may be, `sync/sampler_trainer_kl` in nats a token. null: no limit."""
    on_mismatch: str = key("warn", choices=["warn", "stop", "correct"])
    """Over that limit: warn, stop, or correct: all tokens of the step get truncated importance weights
    min(pi_trainer / pi_sampler, `mismatch_cap`)."""
    mismatch_cap: float = key(2.0, range=SIZE)
    """The largest of the weights with on_mismatch: correct. `loss.correction` weighs in every step, whatever the mismatch."""


@dataclass(frozen=True, kw_only=True)
class WatchdogsConfig(Section, at="watchdogs"):
    """Warnings about runs that go on and learn nothing. See `dapo_jax.health.watchdogs` for what each looks at."""

    enabled: bool = True
    """False: no warnings, and no `watchdog/` metrics."""
    window: int = key(10, range=Range("4 or more", lambda v: v >= 4))
    """Steps at the full learning rate before the reward is called stuck; half of them for flat groups."""
    min_entropy: float = key(0.05, range=NOT_NEGATIVE)
    """Nats; below it, and below a tenth of what it was at first, entropy has collapsed, unless nearly all responses are right."""
    min_length_frac: float = key(0.333, range=FRACTION)
    """Share of the mean length at first; below it, length has collapsed."""
    max_truncated_frac: float = key(0.5, range=FRACTION)
    """Above it, and above what it was at first by 0.25, too many responses are cut off."""
    min_mixed_frac: float = key(0.02, range=FRACTION)
    """Share of groups with both right and wrong responses, or with dynamic_sampling.metric=score of groups whose scores differ; below
    it, all are flat."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Everything that decides a DAPO run."""

    run_dir: str = key(not_empty=True, aliases=["output_dir", "default_local_dir"], may_change=True)
    """Where the run writes: a local folder, or `gs://BUCKET/FOLDER` (extra `gcs`)."""
    seed: int = key(0, range=Range("0 or more and less than 2**32 = 4294967296", lambda v: 0 <= v < 2**32))
    """Seed of the order of prompts, of what is sampled, of shuffling, and of random weights."""
    steps: int = key(
        100,
        range=Range("0 or more (0: evaluate only)", lambda v: v >= 0),
        aliases={
            "max_steps": "",
            "total_training_steps": "",
            "num_training_steps": "",
            "num_train_epochs": "in steps: an epoch has prompts / batch.prompts_per_step of them, fewer with dynamic sampling",
            "total_epochs": "in steps: an epoch has prompts / batch.prompts_per_step of them, fewer with dynamic sampling",
        },
        may_change=True,
    )
    """Passes of the pipe: sample, grade, choose, learn."""
    stall_timeout_s: float = key(1800.0, range=NOT_NEGATIVE, may_change=True)
    """Seconds without progress (of data, sampling, graders, updates, files, other processes) after which the run ends with a report of
    what every thread and process is doing; longer than anything takes to compile. 0: no limit."""
    compilation_cache: str = key("~/.cache/dapo_jax/xla", may_change=True)
    """Folder, local or `gs://...`, of compiled programs that later runs reuse; empty: none."""
    model: ModelConfig = key(default_factory=ModelConfig)
    lora: LoraConfig = key(default_factory=LoraConfig)
    data: DataConfig = key(default_factory=DataConfig)
    sampling: SamplingConfig = key(default_factory=SamplingConfig)
    reward: RewardConfig = key(default_factory=RewardConfig)
    environment: EnvironmentConfig = key(default_factory=EnvironmentConfig)
    dynamic_sampling: DynamicSamplingConfig = key(
        default_factory=DynamicSamplingConfig, aliases=["filter_groups"]
    )
    rollout: RolloutConfig = key(default_factory=RolloutConfig)
    batch: BatchConfig = key(default_factory=BatchConfig)
    loss: LossConfig = key(default_factory=LossConfig)
    optimizer: OptimizerConfig = key(default_factory=OptimizerConfig)
    eval: EvalConfig = key(default_factory=EvalConfig, may_change=True)
    checkpoint: CheckpointConfig = key(default_factory=CheckpointConfig, may_change=True)
    log: LogConfig = key(default_factory=LogConfig, may_change=True)
    guard: GuardConfig = key(default_factory=GuardConfig, may_change=True)
    watchdogs: WatchdogsConfig = key(default_factory=WatchdogsConfig, may_change=True)
    parallel: ParallelConfig = key(default_factory=ParallelConfig, may_change=True)

    @property
    def episode_tokens(self) -> int:
        """The most tokens of a response, or of an episode."""
        return self.environment.episode_tokens or self.sampling.max_response_tokens

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: `batch.row_tokens`, or the longest rollout there can be."""
        return self.batch.row_tokens or self.data.max_prompt_tokens + self.sampling.max_response_tokens

    @property
    def prompts_per_wave(self) -> int:
        """Prompts drawn in one round: `dynamic_sampling.prompts_per_wave`, or the recipe's three times those that a step trains on."""
        return self.dynamic_sampling.prompts_per_wave or 3 * self.batch.prompts_per_step

    @property
    def correction(self) -> Correction:
        """The importance weights of every step, with `auto` and defaults resolved: what `loss.correction` comes to beside the other keys."""
        loss = self.loss
        kind = loss.correction
        if loss.old_logprobs == "sampler":
            kind = "none"
        elif kind == "auto":
            kind = "truncate" if self.rollout.in_flight or loss.importance_cap is not None else "none"
        if kind == "none":
            return Correction(kind, 0.0, math.inf)
        if kind == "truncate":
            return Correction(
                kind, 0.0, IMPORTANCE_CAP if loss.importance_cap is None else loss.importance_cap
            )
        low, high = loss.importance_range or IMPORTANCE_RANGES[kind]
        return Correction(kind, low, high)

    def logs_rollouts(self, step: int) -> bool:
        """True if rollouts of the step are written: of the first, of every `log.rollouts_every_steps` steps and of the last."""
        every = self.log.rollouts_every_steps
        return every > 0 and (step in (1, self.steps) or due(step, every))

    def resolved(self) -> "TrainConfig":
        """The same with `dynamic_sampling.prompts_per_wave` as a number: what a run keeps, and what runs are compared by."""
        dynamic = replace(self.dynamic_sampling, prompts_per_wave=self.prompts_per_wave)
        return replace(self, dynamic_sampling=dynamic)

    def check_together(self) -> None:
        """Checks what its sections say about each other."""
        _check_correction(self)
        _check_guard(self)
        check_attention(self.model, packing=self.batch.packing)
        _check_training_policy(self.sampling)
        _check_eight_bits(self)
        check_merging(self.lora, self.sampling)
        batch, waves = self.batch, self.dynamic_sampling
        if waves.enabled:
            wave = self.prompts_per_wave
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
        overlong, limit, most = self.reward.overlong, self.sampling.max_response_tokens, self.episode_tokens
        if overlong.enabled and overlong.buffer_tokens > most:
            of = (
                "environment.episode_tokens"
                if self.environment.episode_tokens
                else "sampling.max_response_tokens"
            )
            refuse(
                "reward.overlong.buffer_tokens",
                overlong.buffer_tokens,
                f"at most {of} = {most}",
                f"{overlong.buffer_tokens} > {most}: the paper's is a fifth of the limit, here {max(1, most // 5)}; "
                "or set reward.overlong.enabled=false",
            )
        _check_rollout(self)
        _check_environment(self)
        check_row(batch.row_tokens, self.data.max_prompt_tokens, limit, "sampling.max_response_tokens")


def _check_correction(config: TrainConfig) -> None:
    loss, in_flight = config.loss, config.rollout.in_flight
    if in_flight and loss.correction == "none" and loss.old_logprobs == "trainer":
        refuse(
            "loss.correction",
            "none",
            f"auto, truncate, mask or mask_responses with rollout.in_flight = {in_flight}",
            "tokens in flight were drawn by earlier weights, and the ratio to the policy that drew them would be lost, without which training "
            "collapses at an age of a few steps: leave it out, or set loss.old_logprobs=sampler",
        )


def check_merging(lora: LoraConfig, sampling: SamplingConfig) -> None:
    """Refuses to merge adapters where there are none."""
    if sampling.merge_lora and not lora.rank:
        remedy = "there is no adapter to merge: set lora.rank=16, or leave it out"
        refuse("sampling.merge_lora", True, "a lora.rank of 1 or more", remedy)


def _check_guard(config: TrainConfig) -> None:
    guard, loss, correction = config.guard, config.loss, config.correction.kind
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
    if correction != "none":
        found = (
            f"{loss.correction!r}"
            if loss.correction == correction
            else f"{correction!r} (auto, with rollout.in_flight)"
        )
        remedy = "that corrects every step already: set guard.on_mismatch=warn"
        refuse("guard.on_mismatch", "correct", f"no loss.correction, found {found}", remedy)


def _check_rollout(config: TrainConfig) -> None:
    rollout, group, limit = config.rollout, config.batch.group_size, config.sampling.max_response_tokens
    if not rollout.in_flight:
        return
    if rollout.in_flight % group:
        up = -(-rollout.in_flight // group) * group
        remedy = f"groups of {group} responses are replaced whole: {up} is"
        refuse(
            "rollout.in_flight",
            rollout.in_flight,
            f"a multiple of batch.group_size = {group}, or 0 (waves)",
            remedy,
        )
    if rollout.round_tokens > limit:
        needs = f"at most sampling.max_response_tokens = {limit}"
        remedy = f"a response would end before its first round does: {limit} or less, such as {max(1, limit // 16)}"
        refuse("rollout.round_tokens", rollout.round_tokens, needs, remedy)
    if config.dynamic_sampling.surplus == "carry":
        remedy = "with rollout.in_flight surplus groups always wait for the next step: leave it out"
        refuse("dynamic_sampling.surplus", "carry", "'discard' with rollout.in_flight", remedy)


def _check_environment(config: TrainConfig) -> None:
    source, reward = config.environment.source, config.reward
    if not source:
        return
    if config.parallel.sampler_hosts > 1:
        remedy = "processes that share a sampler run its programs together, which an environment's own time would part: set parallel.sampler_hosts=1"
        refuse("environment.source", source, "a sampler for each process", remedy)
    if reward.graders or reward.grader != RewardConfig.grader:
        remedy = "the environment says what an episode is worth: leave reward.grader and reward.graders out"
        refuse("environment.source", source, "no grader beside it", remedy)


def _check_eight_bits(config: TrainConfig) -> None:
    """Refuses to train on what another policy has sampled as if it were the trainer's own."""
    if config.correction.kind != "none":
        return
    for name in ("cache_dtype", "weight_dtype"):
        if value := getattr(config.sampling, name):
            remedy = (
                "rounding makes the sampler another policy, which importance weights correct: set loss.importance_cap=2 or another "
                "loss.correction, or leave it empty"
            )
            refuse(f"sampling.{name}", value, "loss.importance_cap or loss.correction for training", remedy)


def _check_training_policy(sampling: SamplingConfig) -> None:
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


def check_attention(model: ModelConfig, *, packing: bool) -> None:
    """Refuses a kernel of attention for rows or a dtype that it cannot compute."""
    if model.attention != "cudnn":
        return
    if packing:
        remedy = "set batch.packing=false (a rollout a row), or model.attention=xla"
        refuse("model.attention", "cudnn", "rows that hold one rollout", remedy)
    if model.compute_dtype != "bfloat16":
        remedy = "set it to bfloat16, or model.attention=xla"
        refuse("model.compute_dtype", model.compute_dtype, "bfloat16 for model.attention = 'cudnn'", remedy)


def check_row(row: int, prompt: int, response: int, response_key: str) -> None:
    """Refuses packed rows that are too short for the longest prompt and response together, all in tokens; a row of 0 is made as long as they are."""
    if 0 < row < prompt + response:
        refuse(
            "batch.row_tokens",
            row,
            f"0, or at least data.max_prompt_tokens + {response_key}",
            f"{prompt} + {response} = {prompt + response} > {row}: raise it to {prompt + response}, or lower the two",
        )


FREE_TO_CHANGE = tuple(
    name if name in leaf_types(TrainConfig) else f"{name}."
    for name, rules in rules_by_key(TrainConfig).items()
    if rules.may_change
)
"""Keys, and beginnings of keys, that a resumed run may change: they do not decide what is learnt, but for the order in which sums are rounded,
and for what a run does when something goes wrong."""
