"""The only place that turns a configuration into objects: train, sft, evaluate, sample."""

from dapo_jax.run.inference import evaluate, sample
from dapo_jax.run.sft import sft
from dapo_jax.run.train import train

__all__ = ["evaluate", "sample", "sft", "train"]
