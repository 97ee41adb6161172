"""The dataclass that an evaluation without training is read into, and how one follows from a run's own configuration.

Imports no jax.
"""

from dataclasses import dataclass

from dapo_jax.config.data_schema import DataConfig
from dapo_jax.config.keys import Range, key
from dapo_jax.config.schema import (
    EnvironmentConfig,
    EvalConfig,
    ParallelConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from dapo_jax.config.section import Section
from dapo_jax.config.sft_schema import SftConfig


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """Everything that decides an evaluation but the model."""

    seed: int = key(0, range=Range("0 or more and less than 2**32 = 4294967296", lambda v: 0 <= v < 2**32))
    """Seed of what is sampled."""
    compilation_cache: str = "~/.cache/dapo_jax/xla"
    """Folder, local or `gs://...`, of compiled programs that later runs reuse; empty: none."""
    compute_dtype: str = key("float32", choices=["float32", "bfloat16"])
    """Dtype of activations and matrix products: float32 or bfloat16."""
    data: DataConfig = key(default_factory=DataConfig)
    sampling: SamplingConfig = key(default_factory=lambda: SamplingConfig(slots=32, max_response_tokens=1024))
    """Slots, limits and stops; temperature, top-p and top-k are those of `eval`. 32 slots of 1024 tokens unless told otherwise:
    the paper's 20,480 fill any small machine."""
    reward: RewardConfig = key(default_factory=RewardConfig)
    """The grader; the overlong penalty changes no score."""
    environment: EnvironmentConfig = key(default_factory=EnvironmentConfig)
    eval: EvalConfig = key(default_factory=EvalConfig)
    parallel: ParallelConfig = key(default_factory=ParallelConfig)


def evaluation_of(config: TrainConfig | SftConfig | EvaluateConfig) -> EvaluateConfig:
    """The evaluation that a run does while it trains."""
    if isinstance(config, EvaluateConfig):
        return config
    return EvaluateConfig(
        seed=config.seed,
        compilation_cache=config.compilation_cache,
        compute_dtype=config.model.compute_dtype,
        data=config.data,
        sampling=config.sampling,
        reward=config.reward,
        environment=config.environment if isinstance(config, TrainConfig) else EnvironmentConfig(),
        eval=config.eval,
        parallel=config.parallel,
    )
