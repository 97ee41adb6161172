"""The configuration of an evaluation without training, and how it follows from the configuration of a run. Imports no jax."""

import dataclasses
from dataclasses import dataclass

from dapo_jax.config.data_schema import DataConfig
from dapo_jax.config.keys import SEED, key
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
    names = {field.name for field in dataclasses.fields(EvaluateConfig)} - {"compute_dtype"}
    shared = {name: value for name, value in vars(config).items() if name in names}
    return EvaluateConfig(compute_dtype=config.model.compute_dtype, **shared)
