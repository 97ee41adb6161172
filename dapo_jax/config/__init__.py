"""Configurations: the dataclasses, their checks, and loading them from YAML. Imports no jax."""

from dapo_jax.config.data_schema import DataConfig, SourceConfig
from dapo_jax.config.evaluate_schema import EvaluateConfig, evaluation_of
from dapo_jax.config.keys import ConfigError
from dapo_jax.config.loading import changed_keys, load_config, load_evaluation, to_yaml
from dapo_jax.config.schema import (
    BatchConfig,
    CheckpointConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    EvalConfig,
    GraderConfig,
    GuardConfig,
    LogConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    OverlongConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
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
    "EnvironmentConfig",
    "EvalConfig",
    "EvaluateConfig",
    "GraderConfig",
    "GuardConfig",
    "LogConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SftBatchConfig",
    "SftConfig",
    "SourceConfig",
    "TrainConfig",
    "changed_keys",
    "evaluation_of",
    "load_config",
    "load_evaluation",
    "to_yaml",
]
