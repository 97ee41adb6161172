"""The files of a run that a report reads: its configuration, its metrics, and which steps' rollouts were logged.

A run may be going on meanwhile: of metrics.jsonl whole lines are read, and files of rollouts are there whole or not at all.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from typing import Any

from dapo_jax.config import ConfigError, SftConfig, TrainConfig, load_config
from dapo_jax.report.run_states import State, state_of
from dapo_jax.storage import AnyPath, check_access, files_below, path_of
from dapo_jax.trackers.json_lines import LineFollower

_LOGGED = re.compile(r"step_(\d+)\.jsonl")
_EVALUATED = re.compile(r"step_(\d+)/[^/]+\.jsonl")
_NO_RUN = "{place} is no run: {what}; give the run_dir of a training run"


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """One run, as far as it got."""

    name: str
    """The end of its path, as short as tells the runs of a report apart."""
    place: AnyPath
    config: TrainConfig | None
    """None where there is no config.yaml, as beside metrics that were copied alone."""
    rows: Sequence[dict[str, Any]]
    """Lines of metrics.jsonl, one for each step, in order."""
    logged: Sequence[AnyPath]
    """Files of rollouts, in the order of their steps."""
    evaluations: Sequence[AnyPath]
    """Files of problems, in the order of their steps."""
    state: State

    @property
    def by_score(self) -> bool:
        """True if its groups are judged by their scores (`dynamic_sampling.metric=score`): right and wrong mean nothing then."""
        return self.config is not None and self.config.dynamic_sampling.metric == "score"

    @property
    def last_step(self) -> int:
        """The last step with metrics."""
        return self.rows[-1]["step"]


def read_runs(places: Sequence[str | PathLike[str]]) -> list[RunFiles]:
    """Reads run folders, local or in a bucket.

    Raises:
        ConfigError: there is no such run, it has no metrics yet, it is no training run, or a line or its configuration is
            damaged. The message names the folder or file.
    """
    return [reader.read() for reader in readers(places)]


def readers(places: Sequence[str | PathLike[str]], *, early: bool = False) -> "list[Reader]":
    """Readers of run folders, of which nothing has been read yet; with `early` a run may have no metrics yet.

    Raises:
        ConfigError: there is no such folder.
    """
    if not places:
        raise ConfigError("a report is of at least one run; name a run folder")
    found = [_found(place) for place in places]
    names = _names([str(place) for place in found])
    return [Reader(place, name, early=early) for place, name in zip(found, names, strict=True)]


class Reader:
    """Reads one run, and again what has been added since."""

    def __init__(self, place: AnyPath, name: str, *, early: bool) -> None:
        self._place, self._name, self._early = place, name, early
        self._follower = LineFollower(place / "metrics.jsonl")

    def read(self) -> RunFiles:
        """The run as far as it has got.

        Raises:
            ConfigError: it is no training run, or a line or its configuration is damaged; or it has no metrics yet.
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
    """True if there is something of a run in this folder: its configuration, or metrics that were copied alone.

    Raises:
        ConfigError: there can be none: it is a file, or no path of a folder.
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
    """The files of steps, in their order."""
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
            f"{file.parent} is a warm start (dapo-jax sft), which has no rollouts and no groups; a report is of runs of "
            "dapo-jax train"
        ) from None


def _metrics(place: AnyPath, follower: LineFollower, *, known: bool, early: bool) -> list[dict[str, Any]]:
    try:
        rows = follower.read()
    except FileNotFoundError:
        rows = []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; mend that file, or remove the line") from error
    if not rows and not known:
        raise ConfigError(
            f"{place} is no run: it has neither config.yaml nor metrics.jsonl; give the run_dir of a training run"
        )
    if not rows and not early:
        raise ConfigError(
            f"{place} has no metrics yet: metrics.jsonl gets its first line after the first evaluation or step; try again then"
        )
    # A run that was copied from a bucket and went on locally may have a step in both places.
    return list({row["step"]: row for row in rows}.values())


def _names(places: Sequence[str]) -> list[str]:
    """The last part of each path, with as many parts before it as it takes to tell them apart.

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
