"""The checkpoint from which a run resumes: the last intact one."""

import json
from collections.abc import Callable
from typing import TypeVar

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import DamagedError
from dapo_jax.parallel.gather import broadcast_from_first

_Read = TypeVar("_Read")


def restore_last(
    checkpointer: Checkpointer,
    restore: Callable[[int], _Read],
    *,
    say: Callable[[str], None],
    aside: bool = False,
) -> _Read | None:
    """Returns the result of `restore` on the last intact checkpoint; None without checkpoints.

    Args:
        checkpointer: of the run, or of another one.
        restore: reads the checkpoint of a step, by `Checkpointer.restore`.
        say: is called with a message for each damaged checkpoint.
        aside: rename damaged checkpoints to STEP.damaged, so that the run can save those steps again.

    Raises:
        DamagedError: all checkpoints are damaged; they stay.
        CheckpointError: one cannot be read, and may be whole; all stay.
        ValueError: as `Checkpointer.restore`; another run's checkpoint is not skipped.
    """
    checkpointer.wait()
    steps: list[int] = json.loads(broadcast_from_first(json.dumps(checkpointer.steps()).encode()))
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        try:
            found = restore(step)
        except DamagedError as error:
            damaged[step] = str(error)
            continue
        for skipped, problem in damaged.items():
            place = f"; it is now {checkpointer.set_aside(skipped)}" if aside else ""
            say(f"{problem}{place}. Taking step {step} instead")
        return found
    if damaged:
        raise DamagedError(
            f"none of the checkpoints in {checkpointer.folder} can be restored: {'; '.join(damaged.values())}. Restore one from a "
            "backup, or remove that folder to start over"
        )
    return None
