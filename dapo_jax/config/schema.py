"""Configuration dataclasses for training, supervised warm start and evaluation, one per section. The sections about data, models, rewards and the loss are in `data_schema`, `model_schema`, `reward_schema` and `loss_schema`.

Each key is defined once, as a field with its default, its rules (`keys.key`), and its documentation below it. If the DAPO paper (https://arxiv.org/abs/2503.14476)
specifies a value, that value is the default, and the documentation names the equation or section. Checks raise `ConfigError` and never change a value.
"""

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

from dapo_jax.config.data_schema import DataConfig, SourceConfig
from dapo_jax.config.keys import POSITIVE, SEED, SIZE, Range, key, named, refuse
from dapo_jax.config.loss_schema import (
    IMPORTANCE_RANGES,
    AdvantageConfig,
    Correction,
    LossConfig,
    TeacherConfig,
)
from dapo_jax.config.model_schema import DTYPES, TEMPERATURE, LoraConfig, ModelConfig, SamplingConfig
from dapo_jax.config.reward_schema import (
    ClusterConfig,
    EnvironmentConfig,
    RewardConfig,
    SandboxConfig,
    WorkersConfig,
)
from dapo_jax.config.section import Section, due, entries, field_types, leaf_types, rules_by_key

SHARE = Range("0 to 1", lambda v: 0 <= v <= 1)
BETA = Range("0 or more and less than 1", lambda v: 0 <= v < 1)
TOP_P = Range("more than 0 and at most 1 (1: off)", lambda v: 0 < v <= 1)
TOP_K = Range("1 to 2**31 - 1, or 0 or -1 (both: off)", lambda v: -1 <= v < 2**31)
ROUNDS = Range("0 to 1000", lambda v: 0 <= v <= 1000)
AXIS = Range("1 or more devices, or -1 for all remaining devices", lambda v: v >= 1 or v == -1)
STEPS = Range("0 or more (0: evaluate only)", lambda v: v >= 0)


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
    skip_solved: int = key(0)
    """Number of successive visits of a prompt with only correct responses after which the prompt rests for 4 epochs. It is then sampled again, and the count begins at 0. A truncated or
    lost response ends the count. Resting prompts are skipped without changing the order of the others. 2 is a good value, and 1 also skips prompts with signal. 0 means that no prompt rests."""
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
    answer_rounds: int = key(1, range=ROUNDS, only_with="rollout.in_flight")
    """Number of rounds within which graders and environments must answer. Other responses are sampled meanwhile. If 0, sampling waits for each answer."""
    max_staleness: int = key(
        0,
        aliases="max_staleness staleness_threshold max_off_policy_steps",
        only_with="rollout.in_flight",
    )
    """Bound n on staleness, in steps. Each step waits for the groups in flight that started n steps earlier. No group starts while the unfinished and unused groups suffice for n + 1 steps.
    Training data is then rarely older than n steps, and never older than 2n + 1 steps. 0 means no bound."""
    weight_rounds: int = key(0, range=ROUNDS, only_with="rollout.in_flight")
    """Number of rounds that a step samples with its old weights after its groups are chosen. With sample workers (`cluster.samplers`), they run while the weights change, so neither side
    waits. Their tokens are one version older. Without sample workers, they precede the updates. Choose fewer rounds than a step needs; `rollout/rounds` counts both."""
    saved: bool = key(False)
    """Train on the response that each row of the dataset has, instead of sampling, to distil on saved rollouts (https://arxiv.org/abs/2610.11291). A row is a line of RUN_DIR/rollouts, or
    of a file of `dapo-jax eval --keep`. Needs a teacher. Graders and the sampler are used in evaluations only."""
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
    keep: int | dict[str, int] = key(0, choices=["shortest", "reward_per_token", "improbable"])
    """Number of responses of each group to train on (GFPO, https://arxiv.org/abs/2508.09726). The others are dropped before advantages and dynamic sampling. 0 means all responses.
    The shortest responses are kept. {reward_per_token: 8} keeps the 8 responses with the highest reward per token. {improbable: 7} first drops the responses with more than the
    group's mean reward that the policy finds most likely, so that entropy falls less (GRPODropout, https://arxiv.org/abs/2610.11854)."""

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
        """Which responses are kept: shortest, reward_per_token or improbable."""
        return "shortest" if isinstance(self.keep, int) else next(iter(self.keep))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, at="optimizer"):
    """The optimizer, on float32 master weights (Section 4.1)."""

    name: str = key("adamw", choices=["adamw", "muon"], aliases="optim")
    """adamw, or muon (https://kellerjordan.github.io/posts/muon/), which orthogonalizes the update of each weight matrix (also of each expert and
    router), and uses AdamW for all other parameters. Its updates have about the size of AdamW's, so the same learning rates are suitable. It stores one moment per element of a matrix instead of two."""
    learning_rate: float = key(1e-6, range=POSITIVE, aliases="lr")
    """Learning rate after the warm-up. (Section 4.1)"""
    warmup_steps: int = key(20, aliases="lr_warmup_steps warmup_ratio")
    """Linear warm-up, in training steps: step k, counted from 1, uses k / warmup_steps of the learning rate."""
    schedule: str = key(
        "constant", choices=["constant", "linear", "cosine"], aliases="lr_scheduler_type lr_decay_style"
    )
    """Learning rate after the warm-up: constant, or a linear or cosine decay that ends with the run. If the decay has begun, `steps` may not change on resume. (Section 4.1: constant)"""
    decay_steps: int = key(0, aliases="num_decay_steps")
    """Number of last steps in which the learning rate decays. 0 means all steps after the warm-up. A smaller number gives the schedule warmup-stable-decay."""
    end_factor: float = key(0.0, range=SHARE, aliases="min_lr min_lr_ratio min_lr_rate")
    """Factor of the learning rate at which the decay aims. The last step is one step away from it, so no step has a learning rate of 0."""
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

    def steps_before_decay(self, steps: int) -> int:
        """Returns the number of steps before the learning rate decays, in a run of `steps` steps."""
        if self.schedule == "constant":
            return steps
        return steps - self.decay_steps if self.decay_steps else min(self.warmup_steps, steps)

    def check_together(self) -> None:
        for name in ("decay_steps", "end_factor"):
            if self.schedule == "constant" and getattr(self, name):
                remedy = "set optimizer.schedule to linear or cosine, or leave it out"
                self.refuse(name, "a schedule that decays", remedy)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section, at="eval"):
    """Evaluation on held-out prompts."""

    every_steps: int = key(10, aliases="eval_steps test_freq eval_strategy")
    """Number of steps between evaluations. If 0, the run evaluates only before the first and after the last step."""
    datasets: list[dict[str, Any]] = key(default_factory=list, aliases="val_files")
    """Evaluation datasets, each in the form {source: aime_2024, path: ...} (see `SourceConfig`). If empty, `data.eval_split` of `data.source` is used."""
    prompts: int = key(0)
    """Number of prompts to use, from the beginning of each dataset. 0 means all prompts."""
    samples_per_prompt: int = key(32, range=SIZE, aliases="val_kwargs.n num_generations_eval eval.n eval.k")
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
    """Also save and keep the best checkpoint, by avg@k on the first evaluation dataset, or by mean reward on it if dynamic_sampling.metric=score.
    If `eval` is changed on resume, earlier scores no longer count."""


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
    """Number of devices over which a sampler's weights are sharded. The sampler's slots are distributed over groups of this many devices. If a group has more devices than the model has key heads, several of them have the same key head. 0 means the greatest common divisor of `tensor` and the sampler's number of devices."""
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

    response_limit: ClassVar[str] = "sampling.max_response_tokens"
    """The key with the maximum response length."""

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
    sandbox: SandboxConfig = key(default_factory=SandboxConfig)
    workers: WorkersConfig = key(default_factory=WorkersConfig)
    batch: PackedRowsConfig = key(default_factory=PackedRowsConfig)
    optimizer: OptimizerConfig = key(default_factory=OptimizerConfig)
    eval: EvalConfig = key(default_factory=EvalConfig, may_change=True)
    parallel: ParallelConfig = key(default_factory=ParallelConfig, may_change=True)

    @property
    def row_tokens(self) -> int:
        """Number of tokens per packed row: `batch.row_tokens`, or `sequence_tokens`."""
        return self.batch.row_tokens or self.sequence_tokens

    @property
    def sequence_tokens(self) -> int:
        """Maximum number of tokens of a prompt and a response together."""
        return self.data.max_prompt_tokens + attrgetter(self.response_limit)(self)

    def check_together(self) -> None:
        """Checks that every changed key has an effect, and that attention and row length are compatible with the other keys."""
        self.check_effects()
        if self.model.attention == "cudnn" and self.model.compute_dtype != "bfloat16":
            remedy = "set it to bfloat16, or model.attention=xla"
            self.refuse("model.compute_dtype", "bfloat16 for model.attention = 'cudnn'", remedy)
        row, prompt, longest = self.batch.row_tokens, self.data.max_prompt_tokens, self.sequence_tokens
        if 0 < row < longest:
            remedy = (
                f"{prompt} + {longest - prompt} = {longest} > {row}: raise it to {longest}, or lower the two"
            )
            needs = f"0, or at least data.max_prompt_tokens + {self.response_limit}"
            self.refuse("batch.row_tokens", needs, remedy)
        rate = self.optimizer
        if rate.decay_steps > max(0, self.steps - rate.warmup_steps):
            needs = f"at most steps - optimizer.warmup_steps = {self.steps} - {rate.warmup_steps}"
            self.refuse(
                "optimizer.decay_steps", needs, "lower it, or set it to 0 for all steps after the warm-up"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Complete configuration of a DAPO training run."""

    stall_timeout_s: float = key(1800.0, may_change=True)
    """Number of seconds without progress (in data, sampling, grading, updates, files or other processes) after which the run ends with a report on
    every thread and process. It must be longer than the longest compilation. 0 means no limit."""
    environment: EnvironmentConfig = key(default_factory=EnvironmentConfig, only_with="environment.source")
    cluster: ClusterConfig = key(default_factory=ClusterConfig, only_with="cluster.address", may_change=True)
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

    @property
    def corrects_sampler(self) -> bool:
        """Whether the loss corrects for a sampler with another policy than the trainer's: with importance weights, or because its ratio is to the sampler's policy."""
        return self.correction.kind != "none" or self.loss.old_logprobs == "sampler"

    def logs_rollouts(self, step: int) -> bool:
        """Returns whether the rollouts of this step are logged. They are logged in the first step, in the last step, and every `log.rollouts_every_steps` steps."""
        every = self.log.rollouts_every_steps
        return every > 0 and (step in (1, self.steps) or due(step, every))

    def resolved(self) -> "TrainConfig":
        """Returns the configuration to save and to compare on resume, in which `dynamic_sampling.prompts_per_wave` is resolved to a number."""
        dynamic = replace(self.dynamic_sampling, prompts_per_wave=self.prompts_per_wave)
        return replace(self, dynamic_sampling=dynamic)

    def check_together(self) -> None:
        super().check_together()
        sampling, environment = self.sampling, self.environment
        if sampling.temperature == 0:
            remedy = "all responses of a group would be equal: greedy is for eval.temperature only"
            self.refuse("sampling.temperature", "more than 0 for training", remedy)
        for name in ("cache_dtype", "weight_dtype"):
            if getattr(sampling, name) and not self.corrects_sampler:
                remedy = "a rounded sampler is another policy: set loss.correction=truncate or loss.old_logprobs=sampler, or leave it empty"
                self.refuse(f"sampling.{name}", "a loss that corrects for it", remedy)
        buffer, most = self.reward.overlong.buffer_tokens, self.episode_tokens
        if self.reward.overlong.enabled and buffer > most:
            name = (
                "environment.episode_tokens" if environment.episode_tokens else "sampling.max_response_tokens"
            )
            remedy = f"{buffer} > {most}: the paper's is a fifth of the limit, here {max(1, most // 5)}; or set reward.overlong.enabled=false"
            self.refuse("reward.overlong.buffer_tokens", f"at most {name} = {most}", remedy)
        workers = self.workers.of_environment if environment.source else self.workers.of_graders
        if self.cluster.workers and not workers.count:
            self.refuse(
                "cluster.workers", "workers.count of 1 or more", "set workers.count, for example to 8"
            )
        if environment.source and self.parallel.sampler_hosts > 1:
            remedy = "processes that share a sampler run its programs together, but environments do not answer together: set parallel.sampler_hosts=1"
            self.refuse("environment.source", "a sampler for each process", remedy)
        if environment.source and self.reward.grader != RewardConfig.grader and not environment.is_agent:
            remedy = "the environment supplies the rewards: leave reward.grader out"
            self.refuse("environment.source", "no reward.grader", remedy)
        if self.dynamic_sampling.enabled:
            self._check_waves()
        if self.rollout.in_flight:
            self._check_in_flight()
        if self.cluster.samplers and self.parallel.sampler_hosts > 1:
            remedy = "each training process sends the weights to its own sample workers: set it to 1, or cluster.samplers=0"
            self.refuse("parallel.sampler_hosts", "1 with cluster.samplers", remedy)
        if named(self.loss.objective).name == "vespo" and self.correction.kind != "none":
            remedy = "it weighs whole responses itself: set loss.old_logprobs=sampler or loss.correction=none"
            refuse("loss.correction", self.correction.kind, "none with loss.objective = 'vespo'", remedy)
        self._check_advantages()
        if self.teacher.source:
            self._check_teacher()
        if self.rollout.saved:
            self._check_saved()

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
        for name, holds, needs in (
            ("teacher.prompt", "{prompt}" in self.teacher.prompt or not self.teacher.is_self, "a template that contains {prompt}"),
            ("teacher.prompt", self.teacher.is_self or not self.teacher.prompt, "''"),
            ("teacher.kl", self.teacher.kl == "sampled" or not self.teacher.is_self, "'sampled'"),
            ("environment.source", not (self.environment.source and self.teacher.is_self), "no environment"),
        ):  # fmt: skip
            if not holds:
                remedy = "only the policy as its own teacher reads another prompt, and it scores the sampled tokens of one prompt: change it, or use another teacher"
                self.refuse(name, f"{needs} with teacher.source = {self.teacher.source!r}", remedy)
        if self.loss.center and (self.teacher.kl == "sampled" or not self.teacher.rewards):
            remedy = "the advantages of a teacher depend on which token was sampled, and without rewards there are no others: set teacher.kl=full and teacher.rewards=true, or loss.center=0"
            self.refuse("loss.center", "0 with these keys of the teacher", remedy)
        taught = self.teacher.kl == "sampled" or not self.teacher.rewards
        if taught and named(self.loss.select).name in ("low_covariance", "high_covariance"):
            remedy = (
                "it would ignore the advantages of the teacher: set it to all, or choose another selection"
            )
            self.refuse("loss.select", "a selection without advantages with teacher.source", remedy)
        for name, by_reward, needs in (
            ("dynamic_sampling.enabled", self.dynamic_sampling.enabled, "false"),
            ("dynamic_sampling.skip_solved", self.dynamic_sampling.skip_solved > 0, "0"),
            ("environment.credit", self.environment.credit == "turn", "episode"),
            ("advantage.rewards", self.advantage.rewards == "apart", "summed"),
            ("batch.keep", self.batch.kept_by != "shortest", "a number"),
        ):
            if by_reward and not self.teacher.rewards:
                remedy = f"rewards are not learnt, and all groups are trained on: set it to {needs}, or teacher.rewards=true"
                self.refuse(name, f"{needs} with teacher.source", remedy)

    def _check_saved(self) -> None:
        for name, holds, needs in (
            ("teacher.source", bool(self.teacher.source), "a teacher"),
            ("batch.group_size", self.batch.group_size == 1, "1"),
            ("batch.groups_per_update", self.teacher.kl == "full" or self.batch.groups_per_update == self.batch.prompts_per_step, "batch.prompts_per_step, or teacher.kl=full,"),
            ("data.deduplicate", not self.data.deduplicate, "false"),
            ("rollout.in_flight", not self.rollout.in_flight, "0"),
            ("environment.source", not self.environment.source, "no environment"),
        ):  # fmt: skip
            if not holds:
                self.refuse(
                    name, f"{needs} with rollout.saved", "a row has one response: change it, or sample"
                )

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
        if not self.corrects_sampler:
            remedy = "without importance weights, training on tokens of older weights collapses: leave it out, or set loss.old_logprobs=sampler"
            self.refuse("loss.correction", f"importance weights with rollout.in_flight = {in_flight}", remedy)
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

    response_limit = "max_response_tokens"
    max_response_tokens: int = key(64, range=SIZE)
    """Maximum number of tokens in a response, including the end token. A longer response is an error."""
    batch: SftBatchConfig = key(default_factory=SftBatchConfig)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """Complete configuration of an evaluation. The model is chosen separately."""

    seed: int = key(0, range=SEED)
    """Random seed for sampling."""
    compute_dtype: str = key("float32", choices=DTYPES)
    """Dtype of activations and matrix products: float32 or bfloat16."""
    data: DataConfig = key(default_factory=DataConfig)
    sampling: SamplingConfig = key(default_factory=lambda: SamplingConfig(slots=32, max_response_tokens=1024))
    """Slots, length limits and stop strings. Temperature, top-p and top-k are in `eval`. The paper's 20,480 tokens would exceed the memory of small machines."""
    reward: RewardConfig = key(default_factory=RewardConfig)
    """The graders. The overlong penalty does not apply in an evaluation."""
    sandbox: SandboxConfig = key(default_factory=SandboxConfig)
    workers: WorkersConfig = key(default_factory=WorkersConfig)
    environment: EnvironmentConfig = key(default_factory=EnvironmentConfig, only_with="environment.source")
    eval: EvalConfig = key(default_factory=EvalConfig)
    parallel: ParallelConfig = key(default_factory=ParallelConfig)
    check_together = Section.check_effects


FREE_TO_CHANGE = tuple(
    name if name in leaf_types(TrainConfig) else f"{name}."
    for name, rules in rules_by_key(TrainConfig).items()
    if rules.may_change
)
"""Keys, or key prefixes, whose values may change when a run is resumed (`may_change`)."""
