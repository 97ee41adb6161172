"""The point between two steps from which a run can resume, and its form in a checkpoint."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from etils import epath

from dapo_jax.checkpoints.checkpointer import Restored
from dapo_jax.checkpoints.manifest import DamagedError, step_folders
from dapo_jax.checkpoints.packed_flight import flight_of, split_flight
from dapo_jax.checkpoints.packed_groups import carry_groups, check_carry
from dapo_jax.config import ConfigError
from dapo_jax.dapo.dynamic_sampling import InformativeShare
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.parallel.gather import broadcast_from_first
from dapo_jax.run.identity import IDENTITY
from dapo_jax.run.position import Position
from dapo_jax.storage import AnyPath
from dapo_jax.training.state import TrainState

UNFINISHED = "unfinished_metrics"
"""In a checkpoint's progress: the metrics, as JSON, of a step whose evaluation was interrupted; their line is not written yet."""

SHARE = "informative_share"
"""In a checkpoint's progress: the recent share of informative groups, which decides the size of the next wave."""


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
            SHARE: asdict(self.position.share),
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


def resume_point(
    found: Restored, where: str, *, prompt_at: Callable[[int], Prompt], vocabulary: int
) -> ResumePoint:
    """Returns the point at which a restored checkpoint was written.

    Args:
        found: its content.
        where: names the checkpoint in errors.
        prompt_at: ordinal -> prompt.
        vocabulary: number of the model's tokens.

    Raises:
        ConfigError: no training run has saved it.
        DamagedError: its carried groups are inconsistent.
    """
    if IDENTITY not in found.progress:
        raise ConfigError(f"{where} was not saved by `dapo-jax train`, so it cannot be resumed: move it away")
    cursor, unfinished = found.progress["cursor"], found.progress.get(UNFINISHED)
    carry, flight = split_flight(found.carry)
    try:
        check_carry(carry, cursor=cursor, vocabulary=vocabulary, version=found.step)
    except ValueError as error:
        raise DamagedError(f"{where} is damaged: of the groups that it carries over, {error}") from error
    try:
        in_flight = flight_of(flight, vocabulary=vocabulary, version=found.step)
    except ValueError as error:
        raise DamagedError(f"{where} is damaged: of the rollouts in flight, {error}") from error
    groups = carry_groups(carry, prompt_at, version=found.step)
    if in_flight is not None and {group.prompt.ordinal for group in groups} != in_flight.clock.ready.keys():
        raise DamagedError(f"{where} is damaged: it does not carry the groups that wait to be trained on")
    share = InformativeShare(**found.progress.get(SHARE, {}))
    return ResumePoint(
        state=found.state,
        position=Position(
            step=found.step,
            cursor=cursor,
            carry=groups,
            share=share,
            in_flight=in_flight,
        ),
        unfinished=None if unfinished is None else json.loads(unfinished),
    )
