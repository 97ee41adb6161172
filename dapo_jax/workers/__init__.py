"""Worker processes for the user's graders and environments. Each worker has a memory limit, and ends when the process that started it ends."""

from dapo_jax.workers.process import EndedError, Worker

__all__ = ["EndedError", "Worker"]
