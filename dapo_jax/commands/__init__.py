"""The functions of the commands other than `train`: sft, evaluate, sample, convert, score, and the dataset commands."""

from dapo_jax.commands.inference import evaluate, sample
from dapo_jax.commands.sft import sft

__all__ = ["evaluate", "sample", "sft"]
