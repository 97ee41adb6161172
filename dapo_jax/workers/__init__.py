"""Worker processes: they run the user's graders and environments, with a memory limit, and end with the process that started them."""

from dapo_jax.workers.process import EndedError, Worker

__all__ = ["EndedError", "Worker"]
