"""Whether a run is running, finished, or has ended early: when, and why as far as is known.

A file of its own: only here processes are looked for, on this machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dapo_jax.config import TrainConfig
from dapo_jax.storage import AnyPath, entries
from dapo_jax.trackers.run_status import FILE, read_status

_QUIET_S = 600.0
"""A run that is silent for less is taken to be running, whatever its steps take."""
_STEPS = 3.0
"""So many of its longest steps may pass without a line."""
_LOOKED_AT = 50
"""Lines of which the longest step is taken."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run at the time it was read."""

    kind: str
    """`running`, `finished`, `stopped`, `failed`, `silent` (it said that it runs, and then no more), or `unknown`."""
    at: str | None
    """When it ended, or its last sign of life; ISO 8601, UTC."""
    reason: str = ""


def state_of(
    place: AnyPath, config: TrainConfig | None, rows: Sequence[Mapping[str, Any]], *, now: datetime
) -> State:
    """The state that the run's status says, and where it says `running`, whether that is still so.

    A run of an older version, or one that was copied without its status, is finished if its model and the last step are there.
    """
    status, seen = read_status(place), _seen(place)
    at = None if seen is None else seen.isoformat(timespec="seconds")
    if status is not None and status.state in ("finished", "stopped", "failed"):
        return State(kind=status.state, at=status.at, reason=status.reason)
    if status is None or status.state != "running":
        done = config is not None and rows and rows[-1]["step"] >= config.steps
        return State(kind="finished" if done and (place / "model").is_dir() else "unknown", at=at)
    alive = status.is_alive
    if alive is None:
        alive = seen is not None and (now - seen).total_seconds() < _patience_s(rows)
    return State(kind="running" if alive else "silent", at=at)


def _patience_s(rows: Sequence[Mapping[str, Any]]) -> float:
    longest = max(
        (_seconds(row, "time/step_s") + _seconds(row, "time/eval_s") for row in rows[-_LOOKED_AT:]),
        default=0.0,
    )
    return max(_QUIET_S, _STEPS * longest)


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _seen(place: AnyPath) -> datetime | None:
    """When something of a run was written last."""
    folders = ("metrics", "rollouts", "evaluations", "checkpoints")
    newest = [
        files[-1] for folder in folders if (place / folder).is_dir() and (files := entries(place / folder))
    ]
    times = [_modified(path) for path in (place / FILE, place / "metrics.jsonl", *newest) if path.exists()]
    return max((time for time in times if time is not None), default=None)


def _modified(path: AnyPath) -> datetime | None:
    if isinstance(path, Path):
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return None if path.is_dir() else datetime.fromtimestamp(path.stat().mtime, UTC)
