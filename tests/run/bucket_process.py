"""One process of the micro run in a bucket: `python -m tests.run.bucket_process CONFIG [STEP]`, which dies after that step.

It goes on from what the bucket holds. With a step it dies as a preempted machine does: the line of that step and the
checkpoint of the one before are stored, and nothing is closed.
"""

import os
import sys
import time

import jax
from rich.console import Console

from dapo_jax.config import load_config
from dapo_jax.run import train
from dapo_jax.storage import path_of
from dapo_jax.trackers.progress import Progress
from tests.run.conftest import ROWS, correct_by_even_sum

THRESHOLD = "jax_persistent_cache_min_compile_time_secs"


def main(path: str, last: int = 0) -> None:
    """Trains."""
    jax.config.update("jax_num_cpu_devices", 8)  # as many as the tests have
    config = load_config(path)
    # Whatever compiles in less is not kept; here all is, or a program that one process compiled in less would be new in the next.
    keep_all = lambda name, value: update(name, 0.0 if name == THRESHOLD else value)  # noqa: E731
    update, jax.config.update = jax.config.update, keep_all

    def preempted(step, metrics):
        if step == last:
            marker = path_of(config.run_dir) / "checkpoints" / str(step - 1) / "commit_success.txt"
            while not marker.exists():
                time.sleep(0.05)
            os._exit(9)

    quiet = Progress(config.steps, console=Console(quiet=True))
    train(
        config, reward=correct_by_even_sum, prompts=ROWS, eval_rows=ROWS, on_step=preempted, resume=True,
        progress=quiet,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
