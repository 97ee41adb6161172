"""Worker processes run the user's graders and environments. Each has a memory limit and ends with the process that started it."""

from dapo_jax.workers.process import EndedError, Worker

__all__ = ["EndedError", "Worker"]
