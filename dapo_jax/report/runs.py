"""What a report reads of a run: its configuration, its metrics, and which steps' rollouts were logged.

A run may be going on meanwhile: of metrics.jsonl whole lines are read, and files of rollouts are there whole or not at all.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from dapo_jax.config import ConfigError, SftConfig, TrainConfig, load_config
from dapo_jax.storage import AnyPath, check_access, entries, path_of
from dapo_jax.trackers import read_metrics

_LOGGED = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """One run, as far as it got."""

    name: str
    """The end of its path, as short as tells the runs of a report apart."""
    place: AnyPath
    config: TrainConfig | None
    """None where there is no config.yaml, as beside metrics that were copied alone."""
    rows: Sequence[dict[str, Any]]
    """Lines of metrics.jsonl, one for each step, in order; never none."""
    logged: Sequence[AnyPath]
    """Files of rollouts, in the order of their steps."""

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
    if not places:
        raise ConfigError("a report is of at least one run; name a run folder")
    found = [_found(place) for place in places]
    names = _names([str(place) for place in found])
    return [_read(place, name) for place, name in zip(found, names, strict=True)]


def _found(given: str | PathLike[str]) -> AnyPath:
    try:
        place = path_of(given)
        check_access(place, write=False)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not place.is_dir():
        what = "it is a file" if place.exists() else "there is no such folder"
        raise ConfigError(f"{place} is no run: {what}; give the run_dir of a training run")
    return place


def _read(place: AnyPath, name: str) -> RunFiles:
    file = place / "config.yaml"
    config = _config(file) if file.is_file() else None
    logged = {
        int(match[1]): path for path in entries(place / "rollouts") if (match := _LOGGED.fullmatch(path.name))
    }
    return RunFiles(
        name=name,
        place=place,
        config=config,
        rows=_metrics(place, known=config is not None),
        logged=[logged[step] for step in sorted(logged)],
    )


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


def _metrics(place: AnyPath, *, known: bool) -> list[dict[str, Any]]:
    try:
        rows = read_metrics(place / "metrics.jsonl")
    except FileNotFoundError:
        rows = []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; mend that file, or remove the line") from error
    if not rows and not known:
        raise ConfigError(
            f"{place} is no run: it has neither config.yaml nor metrics.jsonl; give the run_dir of a training run"
        )
    if not rows:
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
