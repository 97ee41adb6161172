"""Training runs: modules that build the objects of a run from its configuration, and train."""

from dapo_jax.run.train import train

__all__ = ["train"]
