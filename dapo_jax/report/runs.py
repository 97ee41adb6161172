"""Reads the files of runs: configuration, metrics, the list of logged rollouts and evaluations, and the state of the run.

The run may be running. Only whole lines of metrics.jsonl are read, and files of rollouts are written atomically.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from dapo_jax.config import ConfigError, SftConfig, TrainConfig, load_config
from dapo_jax.storage import AnyPath, check_access, entries, files_below, path_of
from dapo_jax.trackers.json_lines import LineFollower
from dapo_jax.trackers.run_status import FILE, read_status

_LOGGED = re.compile(r"step_(\d+)\.jsonl")
_EVALUATED = re.compile(r"step_(\d+)/[^/]+\.jsonl")
_NO_RUN = "{place} is not a run: {what}; give the run_dir of a training run"

_QUIET_S = 600.0
"""A run that was silent for less counts as running."""
_STEPS = 3.0
"""A run counts as running for this many of its longest steps without a new file."""
_RECENT = 50
"""Number of lines in which the longest step is searched."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run at the time of reading."""

    kind: str
    """`running`, `finished`, `stopped`, `failed`, `silent` (its status is running, but it shows no sign of life), or `unknown`."""
    at: str | None
    """The time of its end, or of its last sign of life; ISO 8601, UTC."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """One run up to now."""

    name: str
    """The end of its path, as short as is unique in the report."""
    place: AnyPath
    config: TrainConfig | None
    """None without config.yaml, for metrics that were copied alone."""
    rows: Sequence[dict[str, Any]]
    """Lines of metrics.jsonl, one for each step, in order."""
    logged: Sequence[AnyPath]
    """Files of rollouts, in the order of their steps."""
    evaluations: Sequence[AnyPath]
    """Files of problems, in the order of their steps."""
    state: State

    @property
    def by_score(self) -> bool:
        """True if scores judge its groups (`dynamic_sampling.metric=score`); verdicts have no meaning then."""
        return self.config is not None and self.config.dynamic_sampling.metric == "score"


def read_runs(places: Sequence[str | PathLike[str]]) -> list[RunFiles]:
    """Reads run folders, local or in a bucket.

    Raises:
        ConfigError: a run does not exist, has no metrics yet, is not a training run, or has a damaged line or configuration.
            The message names the folder or file.
    """
    return [reader.read() for reader in readers(places)]


def readers(places: Sequence[str | PathLike[str]], *, early: bool = False) -> "list[Reader]":
    """Returns readers of run folders; with `early` a run may have no metrics yet.

    Raises:
        ConfigError: there is no such folder.
    """
    if not places:
        raise ConfigError("a report needs at least one run; name a run folder")
    found = [_found(place) for place in places]
    names = _names([str(place) for place in found])
    return [Reader(place, name, early=early) for place, name in zip(found, names, strict=True)]


class Reader:
    """Reads one run repeatedly; metrics are read incrementally."""

    def __init__(self, place: AnyPath, name: str, *, early: bool) -> None:
        self._place, self._name, self._early = place, name, early
        self._follower = LineFollower(place / "metrics.jsonl")

    def read(self) -> RunFiles:
        """Reads the run up to now.

        Raises:
            ConfigError: it is not a training run, has a damaged line or configuration, or has no metrics yet.
        """
        place, file = self._place, self._place / "config.yaml"
        config = _config(file) if file.is_file() else None
        rows = _metrics(place, self._follower, known=config is not None, early=self._early)
        return RunFiles(
            name=self._name,
            place=place,
            config=config,
            rows=rows,
            logged=_of_steps(place / "rollouts", _LOGGED),
            evaluations=_of_steps(place / "evaluations", _EVALUATED),
            state=state_of(place, config, rows, now=datetime.now(UTC)),
        )


def has_begun(given: str | PathLike[str]) -> bool:
    """Returns whether a folder has a run's configuration or metrics.

    Raises:
        ConfigError: it is a file, or not a path of a folder.
    """
    place = _place(given)
    if not place.is_dir():
        if place.exists():
            raise ConfigError(_NO_RUN.format(place=place, what="it is a file"))
        return False
    return any((place / name).exists() for name in ("config.yaml", "metrics.jsonl", "metrics"))


def _place(given: str | PathLike[str]) -> AnyPath:
    try:
        place = path_of(given)
        check_access(place, write=False)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return place


def _found(given: str | PathLike[str]) -> AnyPath:
    place = _place(given)
    if not place.is_dir():
        what = "it is a file" if place.exists() else "there is no such folder"
        raise ConfigError(_NO_RUN.format(place=place, what=what))
    return place


def _of_steps(folder: AnyPath, pattern: re.Pattern[str]) -> list[AnyPath]:
    """Returns the files of steps in their order."""
    names = {path: path.relative_to(folder).as_posix() for path in files_below(folder)}
    found = [(int(match[1]), path) for path, name in names.items() if (match := pattern.fullmatch(name))]
    return [path for _, path in sorted(found)]


def _config(file: AnyPath) -> TrainConfig:
    try:
        return load_config(file)
    except ConfigError as error:
        try:
            load_config(file, schema=SftConfig)
        except ConfigError:
            raise error from None
        raise ConfigError(
            f"{file.parent} is a warm start (dapo-jax sft), which has no rollouts; reports are for runs of dapo-jax train"
        ) from None


def _metrics(place: AnyPath, follower: LineFollower, *, known: bool, early: bool) -> list[dict[str, Any]]:
    try:
        rows = follower.read()
    except FileNotFoundError:
        rows = []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; repair that file, or remove the line") from error
    if not rows and not known:
        raise ConfigError(_NO_RUN.format(place=place, what="it has neither config.yaml nor metrics.jsonl"))
    if not rows and not early:
        raise ConfigError(
            f"{place} has no metrics yet: metrics.jsonl gets its first line after the first evaluation or step; try again later"
        )
    # A run that was copied from a bucket and continued locally may have a step in both places.
    return list({row["step"]: row for row in rows}.values())


def _names(places: Sequence[str]) -> list[str]:
    """Returns the shortest unique ends of the paths.

    >>> _names(["runs/a/seed0", "runs/b/seed0"])
    ['a/seed0', 'b/seed0']
    """
    if twice := {place for place in places if places.count(place) > 1}:
        raise ConfigError(f"{min(twice)} is named twice; a report shows each run once")
    parts = [place.rstrip("/").split("/") for place in places]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(places)


def state_of(
    place: AnyPath, config: TrainConfig | None, rows: Sequence[Mapping[str, Any]], *, now: datetime
) -> State:
    """Returns the state in the run's status file; a status of `running` is checked for signs of life.

    A run that was copied without its status is finished if its model and its last step are there.
    """
    status, seen = read_status(place), _last_written(place)
    at = None if seen is None else seen.isoformat(timespec="seconds")
    if status is not None and status.state in ("finished", "stopped", "failed"):
        return State(kind=status.state, at=status.at, reason=status.reason)
    if status is None or status.state != "running":
        done = config is not None and rows and rows[-1]["step"] >= config.steps
        return State(kind="finished" if done and (place / "model").is_dir() else "unknown", at=at)
    alive = status.is_alive
    if alive is None:
        steps = [(row.get("time/step_s") or 0.0) + (row.get("time/eval_s") or 0.0) for row in rows[-_RECENT:]]
        patience = max(_QUIET_S, _STEPS * max(steps, default=0.0))
        alive = seen is not None and (now - seen).total_seconds() < patience
    return State(kind="running" if alive else "silent", at=at)


def _last_written(place: AnyPath) -> datetime | None:
    """Returns the time of the run's newest file."""
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
