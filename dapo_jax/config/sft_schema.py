"""The dataclasses that the configuration of a supervised warm start is read into. Imports no jax."""

from dataclasses import dataclass

from dapo_jax.config.data_schema import DataConfig
from dapo_jax.config.keys import SIZE, Range, key
from dapo_jax.config.schema import (
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    SamplingConfig,
    check_attention,
    check_merging,
    check_row,
)
from dapo_jax.config.section import Section


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig(Section, at="batch"):
    """Shape of one supervised update."""

    pairs_per_step: int = key(256, range=SIZE)
    """Demonstrations in one update, which is a step."""
    row_tokens: int = key(
        0,
        range=Range("1 or more, or 0 for the longest prompt and response", lambda v: v >= 0),
        aliases=["pack_length", "ppo_max_token_len_per_gpu"],
        may_change=True,
    )
    """Tokens in a packed row; 0: data.max_prompt_tokens + max_response_tokens."""
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
    packing: bool = key(True, may_change=True)
    """Several pairs in a row; false: one."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(Section):
    """A supervised warm start from prompt / response pairs."""

    run_dir: str = key(not_empty=True)
    """Where the run writes: a local folder, or `gs://BUCKET/FOLDER` (extra `gcs`)."""
    seed: int = key(0, range=Range("0 or more and less than 2**32 = 4294967296", lambda v: 0 <= v < 2**32))
    """Seed of the order of pairs, and of random weights."""
    steps: int = key(100, range=Range("0 or more (0: evaluate only)", lambda v: v >= 0))
    """Updates."""
    compilation_cache: str = "~/.cache/dapo_jax/xla"
    """Folder, local or `gs://...`, of compiled programs that later runs reuse; empty: none."""
    max_response_tokens: int = key(64, range=SIZE)
    """A longer demonstration, its end token counted, is an error."""
    model: ModelConfig = key(default_factory=ModelConfig)
    lora: LoraConfig = key(default_factory=LoraConfig)
    data: DataConfig = key(default_factory=DataConfig)
    reward: RewardConfig = key(default_factory=RewardConfig)
    batch: SftBatchConfig = key(default_factory=SftBatchConfig)
    optimizer: OptimizerConfig = key(default_factory=OptimizerConfig)
    eval: EvalConfig = key(default_factory=EvalConfig)
    sampling: SamplingConfig = key(default_factory=SamplingConfig)
    parallel: ParallelConfig = key(default_factory=ParallelConfig)

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: `batch.row_tokens`, or the longest pair there can be."""
        return self.batch.row_tokens or self.data.max_prompt_tokens + self.max_response_tokens

    def check_together(self) -> None:
        """Checks what its sections say about each other."""
        check_attention(self.model, packing=self.batch.packing)
        check_merging(self.lora, self.sampling)
        check_row(
            self.batch.row_tokens,
            self.data.max_prompt_tokens,
            self.max_response_tokens,
            "max_response_tokens",
        )
