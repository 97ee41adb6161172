"""Python functions that implement the commands for models, graders and datasets, except `train`."""

from dapo_jax.commands.inference import evaluate, sample
from dapo_jax.commands.sft import sft

__all__ = ["evaluate", "sample", "sft"]
