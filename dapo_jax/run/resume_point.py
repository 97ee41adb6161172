"""The point between two steps from which a run can resume, and its form in a checkpoint."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from dapo_jax.checkpoints.checkpointer import Restored
from dapo_jax.checkpoints.manifest import DamagedError, step_folders
from dapo_jax.config import ConfigError
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.parallel.gather import broadcast_from_first
from dapo_jax.rollout.collector import Position
from dapo_jax.rollout.packed import flight_of, groups_of, split_flight
from dapo_jax.run.identity import IDENTITY
from dapo_jax.storage import AnyPath
from dapo_jax.training.state import TrainState

UNFINISHED = "unfinished_metrics"
"""In a checkpoint's progress: the metrics, as JSON, of a step whose evaluation was interrupted; their line is not written yet."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A state from which training can resume."""

    state: TrainState
    position: Position
    unfinished: Mapping[str, float | int] | None = None
    """The step's metrics while its evaluation is missing."""

    def progress(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the progress that a checkpoint keeps, with the `identity` of the run; carried groups are stored as arrays."""
        progress: dict[str, Any] = {
            "cursor": self.position.cursor,
            IDENTITY: dict(identity),
        }
        if self.unfinished is not None:
            progress[UNFINISHED] = json.dumps(self.unfinished)  # as text: some may be nan
        return progress


def has_checkpoint(folder: AnyPath) -> bool:
    """Returns whether the folder holds a checkpoint, even a damaged one; in all processes the answer of the first.

    Raises:
        CheckpointError: it cannot be listed.
    """
    return bool(broadcast_from_first(b"checkpoints" if step_folders(epath.Path(folder)) else b""))


def resume_point(found: Restored, where: str, *, prompt_at: Callable[[int], Prompt]) -> ResumePoint:
    """Returns the point at which a restored checkpoint was written.

    Args:
        found: its content.
        where: names the checkpoint in errors.
        prompt_at: ordinal -> prompt.

    Raises:
        DamagedError: groups or responses in flight do not fit together.
    """
    if IDENTITY not in found.progress:
        raise ConfigError(f"{where} was not saved by `dapo-jax train`, so it cannot be resumed: move it away")
    cursor, unfinished = found.progress["cursor"], found.progress.get(UNFINISHED)
    carry, flight = split_flight(found.carry)
    try:
        groups, in_flight = groups_of(carry, prompt_at), flight_of(flight, prompt_at)
    except ValueError as error:
        raise DamagedError(f"{where} is damaged: of its groups and responses in flight, {error}") from error
    return ResumePoint(
        state=found.state,
        position=Position(step=found.step, cursor=cursor, carry=groups, in_flight=in_flight),
        unfinished=None if unfinished is None else json.loads(unfinished),
    )
