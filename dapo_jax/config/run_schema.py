"""The dataclasses that say what a run keeps and which devices it uses. Nothing here decides what is learnt. Imports no jax."""

from dataclasses import dataclass, field

from dapo_jax.config.base import checked


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints stand at step boundaries."""

    every_steps: int = 10
    """0: only after the last step."""
    keep: int = 3
    """How many of the last ones stay."""
    keep_best: bool = True
    """One is also saved, and stays, when avg@k on the first evaluation dataset is better than ever; with dynamic_sampling.metric=score,
    the mean reward there."""
    grace_s: float = 25.0
    """How long a run that is told to stop (SIGTERM, SIGINT, SIGHUP) may take to save; then it ends without."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written beside metrics.jsonl."""

    rollouts_every_steps: int = 10
    """Write readable rollout samples every so many steps, and of the first and the last step; 0: never."""
    rollout_groups: int = 4
    """Groups in one sample."""
    eval_responses: int = 64
    """Responses to each held-out dataset that an evaluation writes: of every problem the first, then the second, until there are so
    many; 0: none."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps of which a trace for xprof is written to `run_dir/profile`; the first ones are mostly compilation."""
    tensorboard: bool = False
    """Events for TensorBoard too (extra `tensorboard`); not with a run in a bucket."""
    wandb: bool = False
    """Weights & Biases too (extra `wandb`)."""
    wandb_project: str = "dapo_jax"
    """The project that the run is put into there."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the mesh axes; -1 (on one axis) takes the devices that the others leave."""

    data: int = 1
    """Devices with a whole copy of the parameters each, over which rows are spread."""
    fsdp: int = -1
    """Devices over which parameters, moments and rows are split; the first to raise."""
    tensor: int = 1
    """Devices over which heads, MLP and vocabulary are split; must divide the key heads, best inside a host."""
    context: int = 1
    """Devices over which a row of tokens is split, for long responses."""
    sampler_tensor: int = 0
    """Devices over which a sampler's weights are split; its slots are spread over its other devices. 0: as `tensor`."""
    sampler_hosts: int = 1
    """Processes that share a sampler; more than 1 only for weights that do not fit the devices of one."""

    __post_init__ = checked
