"""Training runs: modules that build a run's objects from its configuration and run the training loop."""

from dapo_jax.run.train import train

__all__ = ["train"]
