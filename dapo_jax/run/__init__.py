"""A training run: the only room that makes objects from a configuration."""

from dapo_jax.run.train import train

__all__ = ["train"]
