"""The dataclasses that the configuration of a supervised warm start is read into. Imports no jax."""

from dataclasses import dataclass, field

from dapo_jax.config.base import checked, due
from dapo_jax.config.data_schema import DataConfig
from dapo_jax.config.schema import (
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    SamplingConfig,
)


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig:
    """Shape of one supervised update."""

    pairs_per_step: int = 256
    """Demonstrations in one update, which is a step."""
    row_tokens: int = 0
    """Tokens in a packed row; 0: data.max_prompt_tokens + max_response_tokens."""
    rows_per_microbatch: int = 1
    """Packed rows in one forward and backward pass."""
    packing: bool = True
    """Several pairs in a row; false: one."""

    __post_init__ = checked


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """A supervised warm start from prompt / response pairs."""

    run_dir: str
    """Where the run writes: a local folder, or `gs://BUCKET/FOLDER` (extra `gcs`)."""
    seed: int = 0
    """Of the order of pairs, and of random weights."""
    steps: int = 100
    """Updates."""
    compilation_cache: str = "~/.cache/dapo_jax/xla"
    """Folder, local or `gs://...`, of compiled programs that later runs reuse; empty: none."""
    max_response_tokens: int = 64
    """A longer demonstration, its end token counted, is an error."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    batch: SftBatchConfig = field(default_factory=SftBatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    __post_init__ = checked

    def evaluates_after(self, step: int) -> bool:
        """True if the policy is evaluated after the step: after every `eval.every_steps` steps and after the last."""
        return step == self.steps or due(step, self.eval.every_steps)

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: `batch.row_tokens`, or the longest pair there can be."""
        return self.batch.row_tokens or self.data.max_prompt_tokens + self.max_response_tokens
