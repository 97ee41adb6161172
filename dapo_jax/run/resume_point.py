"""The point between two steps that a run can go on from, and what a checkpoint keeps of it beside the train state."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from etils import epath

from dapo_jax.checkpoints.checkpointer import Restored
from dapo_jax.checkpoints.manifest import DamagedError, step_folders
from dapo_jax.checkpoints.packed_flight import flight_of, split_flight
from dapo_jax.checkpoints.packed_groups import carry_groups, check_carry
from dapo_jax.dapo.dynamic_sampling import InformativeShare
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.parallel.gather import broadcast_from_first
from dapo_jax.plain_json import read_object
from dapo_jax.run.identity import IDENTITY
from dapo_jax.run.position import Position
from dapo_jax.storage import AnyPath
from dapo_jax.training.state import TrainState

UNFINISHED = "unfinished_metrics"
"""In a checkpoint's progress: the metrics, as JSON, of a step whose evaluation was cut short; its line is yet to be written."""

SHARE = "informative_share"
"""In a checkpoint's progress: how many groups were informative of late, which the size of the next wave follows."""

_MOST_PROMPTS = 1 << 53
"""No run draws so many; ordinals are 64-bit integers."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A state that training can go on from."""

    state: TrainState
    position: Position
    unfinished: Mapping[str, float | int] | None = None
    """The step's metrics, as long as they lack its evaluation."""

    def progress(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """The progress that a checkpoint keeps, with the `identity` of the run; the carried groups lie beside it."""
        progress: dict[str, Any] = {
            "cursor": self.position.cursor,
            SHARE: asdict(self.position.share),
            IDENTITY: dict(identity),
        }
        if self.unfinished is not None:
            progress[UNFINISHED] = json.dumps(self.unfinished)  # as text: some may be nan
        return progress


def has_checkpoint(folder: AnyPath) -> bool:
    """Whether the folder holds a checkpoint, damaged ones included. All processes take the first one's answer: otherwise some would wait for
    others to restore while these read the initial weights.

    Raises:
        CheckpointError: it cannot be listed, or is a link to nothing.
    """
    return bool(broadcast_from_first(b"checkpoints" if step_folders(epath.Path(folder)) else b""))


def resume_point(
    found: Restored, where: str, *, prompt_at: Callable[[int], Prompt], vocabulary: int
) -> ResumePoint:
    """The point at which a restored checkpoint was written.

    Args:
        found: its content, whose progress `check_progress` has passed.
        where: names the checkpoint in errors.
        prompt_at: ordinal -> prompt.
        vocabulary: tokens below this are of the model.

    Raises:
        DamagedError: the groups that it carries over are not as a run writes them.
    """
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
    share = InformativeShare(**found.progress.get(SHARE, {}))  # older ones have none
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


def check_progress(where: str, progress: Mapping[str, Any]) -> None:
    """Refuses what no run has written as a checkpoint's progress; `where` names the checkpoint.

    Raises:
        DamagedError: names the entry.
    """
    cursor, unfinished = progress.get("cursor"), progress.get(UNFINISHED, "{}")
    if not isinstance(cursor, int) or isinstance(cursor, bool) or not 0 <= cursor < _MOST_PROMPTS:
        raise DamagedError(f"{where} is damaged: its place among the prompts is {cursor!r:.60}")
    share = progress.get(SHARE, {})
    if not isinstance(share, Mapping) or not share.keys() <= {
        field.name for field in fields(InformativeShare)
    }:
        raise DamagedError(f"{where} is damaged: its share of informative groups is {share!r:.60}")
    for name, count in share.items():
        if not isinstance(count, float | int) or not 0 <= count < _MOST_PROMPTS:
            raise DamagedError(
                f"{where} is damaged: its share of informative groups has {count!r:.60} {name}"
            )
    try:
        metrics = read_object(unfinished.encode(), UNFINISHED)
    except (AttributeError, ValueError) as error:
        raise DamagedError(f"{where} is damaged: {error}") from error
    for name, value in metrics.items():
        if not isinstance(value, float | int):
            raise DamagedError(f"{where} is damaged: its metric {name[:60]!r} is {value!r:.60}")
