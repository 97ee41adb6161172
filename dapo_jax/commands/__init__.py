"""The Python functions for all commands that use models, graders or datasets, except `train`."""

from dapo_jax.commands.inference import evaluate, sample
from dapo_jax.commands.sft import sft

__all__ = ["evaluate", "sample", "sft"]
