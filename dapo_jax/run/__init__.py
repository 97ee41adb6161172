"""Training runs: builds the objects of a run from its configuration, and trains."""

from dapo_jax.run.train import train

__all__ = ["train"]
