"""The dataclasses that a training configuration is read into; `data_schema` has those of its data, `guard_schema` those of its
guards, `run_schema` what a run keeps and which devices it uses, `sft_schema` those of a warm start. Imports no jax.

Defaults are the paper's where the paper gives one (DAPO, https://arxiv.org/abs/2503.14476), each with its
equation or section. Checks raise `ConfigError` with the arithmetic; nothing here changes a value.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from dapo_jax.config.base import checked, due
from dapo_jax.config.data_schema import DataConfig
from dapo_jax.config.guard_schema import GuardConfig, WatchdogsConfig
from dapo_jax.config.run_schema import CheckpointConfig, LogConfig, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which decoder, and how it computes."""

    source: str = "preset:tiny"
    """`preset:NAME` (random weights), `shipped:NAME` (a model that comes with the package), `hf:ORG/NAME` (from the
    Hugging Face hub), or a folder with config.json, tokenizer.json and model.safetensors."""
    revision: str = ""
    """Of a model from the hub: a branch, a tag or a commit; empty: its main branch. A commit keeps a run repeatable."""
    cache_dir: str = ""
    """Where models from the hub are kept; empty: where huggingface_hub keeps them (HF_HOME)."""
    tokenizer: str = "byte"
    """For a preset: `byte`, or `char:ALPHABET` with one token for each character. A model folder brings its own."""
    compute_dtype: str = "float32"
    """Dtype of activations and matrix products: float32 or bfloat16. Master weights are always float32."""
    attention: str = "auto"
    """In training. xla runs everywhere; splash is a TPU kernel, cudnn one for NVIDIA GPUs, which needs batch.packing=false and
    bfloat16; neither of the two lets responses share their prompt. auto: splash on a TPU, cudnn on a GPU where it can, else xla."""
    remat: str = "none"
    """What the backward pass recomputes per layer: none, full, or dots (keeps matrix products)."""
    logprob_chunk_vocab: int = 2048
    """Vocabulary entries whose logits exist at one time, for all tokens of a microbatch, when log-probabilities are computed."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How responses are sampled for training."""

    temperature: float = 1.0
    """Of the policy that samples and of the one that is trained alike. (Section 4.1)"""
    top_p: float = 1.0
    """Off: a cut distribution is not the one whose ratio is taken."""
    top_k: int = 0
    """Off, for the same reason."""
    max_response_tokens: int = 20480
    """Hard length limit: expected length plus the soft overlong buffer. (Section 4.1)"""
    slots: int = 256
    """Responses decoded side by side, by each sampler: there is one for every `parallel.sampler_hosts` processes."""
    steps_per_call: int = 16
    """Decode steps on the device between two looks of the host."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response. It keeps the tokens up to the one that completes a string; graders see the text
    before it. Evaluation stops there too."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids that end a response besides the tokenizer's end tokens."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Soft overlong punishment (Eq. 13) and overlong filtering (Section 3.4)."""

    enabled: bool = True
    """Add the soft punishment to the rule reward."""
    buffer_tokens: int = 4096
    """L_cache: the last stretch before the limit in which the penalty grows."""
    penalty_factor: float = 1.0
    """The whole penalty, reached at the limit. (Eq. 13)"""
    filter_truncated: bool = False
    """Overlong filtering: a truncated response keeps its reward but none of its tokens enters the loss."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class GraderConfig:
    """One of `reward.graders`."""

    grader: str
    """As `reward.grader`."""
    weight: float = 1.0
    """What its reward is multiplied by in the sum; below 0 for what is to be avoided."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How a response becomes a reward."""

    grader: str = "exact"
    """A name in `dapo_jax.rewards.GRADERS` (exact, dapo, dapo_boxed, math, gsm8k), `reasoning_gym` (the task's own scorer),
    `module:function`, or `path/to/file.py:function`; `trl:` or `verl:` before it for a function written for these."""
    graders: list[dict[str, Any]] = field(default_factory=list)
    """Several instead of `grader`: [{grader: math}, {grader: "my.py:brief", weight: 0.5}]. The reward is the sum of weight x reward;
    the first alone says whether a response is correct, the others shape."""
    answer_marker: str = "="
    """The exact grader takes what follows the last marker as the answer; empty: the whole response."""
    workers: int = 2
    """Processes for each grader while sampling goes on; 0: this process, without a time limit. Graders that only compare text (exact,
    dapo, dapo_boxed, gsm8k), reasoning_gym, async functions and those passed from Python run in this process anyway."""
    async_calls: int = 64
    """Calls of async functions that are under way at one time."""
    timeout_s: float = 10.0
    """Seconds for one call: a response, or a group if the function takes one whole. What takes longer counts as wrong."""
    worker_memory_mb: int = 2048
    """What a worker may take beyond what the loaded grader needs; a response that takes more counts as wrong. (Linux)"""
    on_nonfinite: str = "error"
    """A score that is NaN, infinite or beyond 1e30 in size: error, or lost (that response has no verdict and counts as wrong)."""
    correct: float = 1.0
    """Reward of a correct verdict that has no score. (Section 2.4)"""
    incorrect: float = -1.0
    """Reward of a wrong one. (Section 2.4)"""
    lost: float | None = None
    """Reward, before its weight, where a grader that returns scores gave none (time, memory, a dead worker); never better than the worst
    that this grader paid for the prompt's other responses. None: `incorrect` (of a
    grader of negative weight `correct`), with the same bound."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Keep sampling until enough groups are neither all right nor all wrong (Eq. 11, Algorithm 1)."""

    enabled: bool = True
    """False: one wave of as many prompts as are trained on, flat groups among them."""
    prompts_per_wave: int = 0
    """Prompts drawn in one round; 0: three times `batch.prompts_per_step`, as in the released recipe (1536 for 512). A run's config.yaml
    has the number."""
    max_waves: int = 10
    """Waves of one step; the recipe's limit. With `surplus=carry`, where waves are smaller, as many prompts as these have when whole."""
    on_shortfall: str = "error"
    """When `max_waves` gave too few groups: error, or train_fewer."""
    surplus: str = "discard"
    """Informative groups beyond those needed: discard (as released), or carry into the next step. With carry a wave has about as
    many prompts as the missing groups ask for by the share that was informative lately, `prompts_per_wave` at most."""
    max_age_steps: int = 1
    """With `surplus=carry`: the most steps between sampling a group and training on it; older ones are dropped."""
    metric: str = "correct"
    """What counts: correct (verdicts; of several graders the first's) or score (numbers, or the sum of several graders: a group is kept
    when they are not all equal). With score the terminal, the watchdogs and the best checkpoint go by rewards, also where `enabled` is
    false; a number above 0 is a correct response only with correct."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many prompts, responses and optimizer updates make one step."""

    prompts_per_step: int = 512
    """Groups that a step trains on. (Section 4.1)"""
    group_size: int = 16
    """Responses to each prompt, G. (Section 4.1)"""
    groups_per_update: int = 32
    """Groups in one optimizer update: 32 x 16 = 512 responses, 16 updates a step. (Section 4.1)"""
    rows_per_microbatch: int = 1
    """Packed rows in one forward and backward pass."""
    row_tokens: int = 0
    """Tokens in a packed row; 0: data.max_prompt_tokens + sampling.max_response_tokens. In longer rows more responses share
    their prompt, which is then computed once; attention costs the square of a row."""
    packing: bool = True
    """Several rollouts in a row; false: one."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Knobs of `losses.dapo_loss` and of what surrounds it."""

    clip_ratio_low: float = 0.2
    """eps_low of Eq. 8."""
    clip_ratio_high: float = 0.28
    """eps_high of Eq. 8; equal to `clip_ratio_low` it is the plain PPO clip."""
    dual_clip: float | None = None
    """c of the dual clip: for a negative advantage the token loss is at most c |A|. None: off."""
    aggregation: str = "token_mean"
    """token_mean, prompt_mean, sequence_mean or token_sum_norm: see `losses.token_weights`."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (Eq. 9)."""
    old_logprobs: str = "trainer"
    """trainer: recomputed with the weights at the step's start; sampler: those recorded while sampling, for groups that were carried
    with older weights."""
    importance_cap: float | None = None
    """Truncated importance weights min(pi_old / pi_sampler, cap) on each token. None: off."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 loads and runs no reference policy. (Section 2.3)"""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW on float32 master weights (Section 4.1)."""

    learning_rate: float = 1e-6
    """After the warm-up; constant. (Section 4.1)"""
    warmup_steps: int = 20
    """Linear warm-up in rollout steps: step k, from 1, runs at k / warmup_steps of the rate."""
    beta1: float = 0.9
    """Decay of the first moment; PyTorch's default."""
    beta2: float = 0.999
    """Decay of the second moment; PyTorch's default."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Of all parameters, times the learning rate; the released recipe's."""
    max_grad_norm: float = 1.0
    """A gradient with a larger norm is scaled down to it; the released recipe's."""
    offload: bool = False
    """Keep the moments in the host's memory between updates: 8 bytes a parameter less on the devices, which they cross twice an
    update."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    every_steps: int = 10
    """0: only before the first and after the last step."""
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """{source: aime_2024, path: ...} for each dataset, see `SourceConfig`; empty: `data.eval_split` of `data.source`."""
    prompts: int = 0
    """How many prompts of each dataset, from the first; 0: all."""
    samples_per_prompt: int = 32
    """k of avg@k. (Section 4.1)"""
    temperature: float = 1.0
    """0: greedy. (Section 4.1)"""
    top_p: float = 0.7
    """The smallest set of tokens with this share of the probability; 1: off. (Section 4.1)"""
    top_k: int = 0
    """The most likely tokens, so many; 0: off."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a DAPO run."""

    run_dir: str
    """Where the run writes: a local folder, or `gs://BUCKET/FOLDER` (extra `gcs`)."""
    seed: int = 0
    """Of the order of prompts, of what is sampled, of shuffling, and of random weights."""
    steps: int = 100
    """Passes of the pipe: sample, grade, choose, learn."""
    stall_timeout_s: float = 1800.0
    """Seconds without progress (of data, sampling, graders, updates, files, other processes) after which the run ends with a report of
    what every thread and process is doing; longer than anything takes to compile. 0: no limit."""
    compilation_cache: str = "~/.cache/dapo_jax/xla"
    """Folder, local or `gs://...`, of compiled programs that later runs reuse; empty: none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    watchdogs: WatchdogsConfig = field(default_factory=WatchdogsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    __post_init__ = checked

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: `batch.row_tokens`, or the longest rollout there can be."""
        return self.batch.row_tokens or self.data.max_prompt_tokens + self.sampling.max_response_tokens

    @property
    def prompts_per_wave(self) -> int:
        """Prompts drawn in one round: `dynamic_sampling.prompts_per_wave`, or the recipe's three times those that a step trains on."""
        return self.dynamic_sampling.prompts_per_wave or 3 * self.batch.prompts_per_step

    def evaluates_after(self, step: int) -> bool:
        """True if the policy is evaluated after the step: after every `eval.every_steps` steps and after the last."""
        return step == self.steps or due(step, self.eval.every_steps)

    def saves_after(self, step: int) -> bool:
        """True if a checkpoint is saved after the step: after every `checkpoint.every_steps` steps and after the last."""
        return step == self.steps or due(step, self.checkpoint.every_steps)

    def logs_rollouts(self, step: int) -> bool:
        """True if rollouts of the step are written: of the first, of every `log.rollouts_every_steps` steps and of the last."""
        every = self.log.rollouts_every_steps
        return every > 0 and (step in (1, self.steps) or due(step, every))

    def resolved(self) -> "TrainConfig":
        """The same with `dynamic_sampling.prompts_per_wave` as a number: what a run keeps, and what runs are compared by."""
        dynamic = replace(self.dynamic_sampling, prompts_per_wave=self.prompts_per_wave)
        return replace(self, dynamic_sampling=dynamic)
