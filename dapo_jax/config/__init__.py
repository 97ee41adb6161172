"""Configurations: the dataclasses, their checks, and loading them from YAML. This package does not import jax."""

from dapo_jax.config.algorithms import ALGORITHMS
from dapo_jax.config.data_schema import DataConfig, SourceConfig
from dapo_jax.config.keys import ConfigError
from dapo_jax.config.loading import changed_keys, load_config, load_evaluation, to_yaml
from dapo_jax.config.loss_schema import AdvantageConfig, LossConfig, TeacherConfig
from dapo_jax.config.model_schema import LoraConfig, ModelConfig, SamplingConfig
from dapo_jax.config.reward_schema import (
    EnvironmentConfig,
    GraderConfig,
    OverlongConfig,
    RewardConfig,
    WorkersConfig,
)
from dapo_jax.config.schema import (
    BatchConfig,
    CheckpointConfig,
    DynamicSamplingConfig,
    EvalConfig,
    EvaluateConfig,
    GuardConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    SftBatchConfig,
    SftConfig,
    TrainConfig,
    evaluation_of,
)

__all__ = [
    "ALGORITHMS",
    "AdvantageConfig",
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
    "TeacherConfig",
    "TrainConfig",
    "WorkersConfig",
    "changed_keys",
    "evaluation_of",
    "load_config",
    "load_evaluation",
    "to_yaml",
]
