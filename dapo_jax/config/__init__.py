"""Configurations: the dataclasses, reading them from YAML, and the rules they obey. Imports no jax."""

from dapo_jax.config.loading import changed_keys, load_config, to_yaml
from dapo_jax.config.schema import (
    BatchConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    DynamicSamplingConfig,
    EvalConfig,
    GraderConfig,
    LogConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    OverlongConfig,
    ParallelConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from dapo_jax.config.sft_schema import SftBatchConfig, SftConfig

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DynamicSamplingConfig",
    "EvalConfig",
    "GraderConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "ParallelConfig",
    "RewardConfig",
    "SamplingConfig",
    "SftBatchConfig",
    "SftConfig",
    "TrainConfig",
    "changed_keys",
    "load_config",
    "to_yaml",
]
