"""The checkpoint that a run goes on from: the last one that is as it was written."""

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
    """The result of `restore` on the last intact checkpoint; None if there is none at all.

    Args:
        checkpointer: of the run, or of another one.
        restore: reads the checkpoint of a step, by `Checkpointer.restore`.
        say: told of each damaged checkpoint that is passed over.
        aside: these are renamed to STEP.damaged, so that the run can save those steps again.

    Raises:
        DamagedError: there are checkpoints, and all are damaged; they stay as they are.
        CheckpointError: one cannot be read, and may be whole; all stay as they are.
        ValueError: as `Checkpointer.restore`; another run's checkpoint is not passed over.
    """
    checkpointer.wait()
    # As the first process sees them: where another does not see that checkpoint, it says so.
    steps: list[int] = json.loads(broadcast_from_first(json.dumps(checkpointer.steps()).encode()))
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        try:
            found = restore(step)
        except DamagedError as error:
            damaged[step] = str(error)
            continue
        for passed_over, problem in damaged.items():
            place = f"; it is now {checkpointer.set_aside(passed_over)}" if aside else ""
            say(f"{problem}{place}. Taking step {step} instead")
        return found
    if damaged:
        raise DamagedError(
            f"none of the checkpoints in {checkpointer.folder} can be restored: {'; '.join(damaged.values())}. Bring one "
            "back from a copy, or remove that folder to begin anew"
        )
    return None
