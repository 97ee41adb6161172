"""Loads the files of runs: configuration, metrics, lists of rollout and evaluation files, and the status.

A run may still be active, so only complete lines of metrics.jsonl are read. All other files are written atomically.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import PathLike
from typing import Any

from etils import epath

from dapo_jax.config import ConfigError, TrainConfig, load_config
from dapo_jax.config.keys import prefixed
from dapo_jax.storage import AnyPath, check_access, entries, files_below, in_bucket, path_of
from dapo_jax.storage.locks import is_held
from dapo_jax.trackers import read_metrics
from dapo_jax.trackers.run_status import FILE, RunStatus, read_status

_LOGGED = re.compile(r"step_(\d+)\.jsonl")
_EVALUATED = re.compile(r"step_(\d+)/[^/]+\.jsonl")
_NO_RUN = "{folder} is not a run: {what}; give the run_dir of a training run"


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of one run's files at the time of loading."""

    name: str
    """The shortest suffix of the run's path that is unique in the report."""
    folder: AnyPath
    config: TrainConfig | None
    """The run's configuration, or None if config.yaml is missing, for example because only the metrics were copied."""
    rows: Sequence[dict[str, Any]]
    """Lines of metrics.jsonl, one for each step, in order."""
    logged: Sequence[AnyPath]
    """Rollout files in step order."""
    evaluations: Sequence[AnyPath]
    """Evaluation files in step order."""
    status: RunStatus
    """The status at the time of loading. Its state may also be `silent` (the lock is free, but no end was recorded) or `unknown`."""

    @property
    def by_score(self) -> bool:
        """True if groups are judged by their scores (`dynamic_sampling.metric=score`), so that verdicts have no meaning."""
        return self.config is not None and self.config.dynamic_sampling.metric == "score"


def read_runs(folders: Sequence[str | PathLike[str]]) -> list[RunFiles]:
    """Loads run folders, local or in a bucket. Raises ConfigError if a run does not exist, has no metrics yet, is not a training run, or has a damaged line or
    configuration. The message names the folder or file."""
    return [read_run(folder, name) for name, folder in named(folders).items()]


def named(folders: Sequence[str | PathLike[str]]) -> dict[str, AnyPath]:
    """Maps run names to run folders. A run's name is the shortest suffix of its path that is unique. A missing folder raises ConfigError."""
    if not folders:
        raise ConfigError("a report needs at least one run; name a run folder")
    runs = [_folder_of(folder) for folder in folders]
    for folder in runs:
        if not folder.is_dir():
            raise ConfigError(_NO_RUN.format(folder=folder, what="there is no such folder"))
        if runs.count(folder) > 1:
            raise ConfigError(f"{folder} is named twice; a report shows each run once")
    names, count = dict[str, AnyPath](), 0
    while len(names) < len(runs):
        count += 1
        names = {"/".join(str(folder).split("/")[-count:]): folder for folder in runs}
    return names


def read_run(folder: AnyPath, name: str, *, early: bool = False) -> RunFiles:
    """Loads one run. If `early` is set, the run may have no metrics yet. Raises the same errors as `read_runs`."""
    file = folder / "config.yaml"
    try:
        config = load_config(file) if file.is_file() else None
    except ConfigError as error:
        raise ConfigError(f"{error}; reports are only for runs of dapo-jax train") from error
    try:
        rows = read_metrics(folder / "metrics.jsonl")
    except FileNotFoundError:
        rows = []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; repair that file, or remove the line") from error
    if not rows and config is None:
        raise ConfigError(_NO_RUN.format(folder=folder, what="it has neither config.yaml nor metrics.jsonl"))
    if not rows and not early:
        raise ConfigError(
            f"{folder} has no metrics yet: metrics.jsonl gets its first line after the first evaluation or step; try again later"
        )
    return RunFiles(
        name=name,
        folder=folder,
        config=config,
        # A run that was copied from a bucket and resumed locally may have a step in both metrics/ and metrics.jsonl.
        rows=list({row["step"]: row for row in rows}.values()),
        logged=_of_steps(folder / "rollouts", _LOGGED),
        evaluations=_of_steps(folder / "evaluations", _EVALUATED),
        status=_status_of(folder, config, rows),
    )


def has_begun(run: str | PathLike[str]) -> bool:
    """Returns whether the folder `run` contains a run's configuration or metrics. If it is a file, raises ConfigError."""
    folder = _folder_of(run)
    return any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", "metrics"))


def _folder_of(run: str | PathLike[str]) -> AnyPath:
    with prefixed(""):
        folder = path_of(run)
        check_access(folder, write=False)
    if not folder.is_dir() and folder.exists():
        raise ConfigError(_NO_RUN.format(folder=folder, what="it is a file"))
    return folder


def _of_steps(folder: AnyPath, pattern: re.Pattern[str]) -> list[AnyPath]:
    """Returns the files whose names match `pattern`, in step order."""
    names = {path: path.relative_to(folder).as_posix() for path in files_below(folder)}
    steps = {path: int(match[1]) for path, name in names.items() if (match := pattern.fullmatch(name))}
    return sorted(steps, key=lambda path: (steps[path], path))


def _status_of(folder: AnyPath, config: TrainConfig | None, rows: Sequence[Mapping[str, Any]]) -> RunStatus:
    """Returns the status in the run's status file. If its state is `running`, the run's lock shows whether the run is active.

    A run that was copied without its status file is considered finished if its model and its last step exist.
    """
    status, at = read_status(folder), _last_written(folder)
    if status is None:
        done = config is not None and rows and rows[-1]["step"] >= config.steps
        return RunStatus(state="finished" if done and (folder / "model").is_dir() else "unknown", at=at)
    if status.state != "running":
        return status
    return replace(status, state={True: "running", False: "silent", None: "unknown"}[is_held(folder)], at=at)


def _last_written(run: AnyPath) -> str | None:
    """Returns the modification time of the run's newest file."""
    folders = [run / name for name in ("metrics", "rollouts", "evaluations", "checkpoints")]
    newest = [files[-1] for folder in folders if (files := entries(folder))]
    paths = [epath.Path(path) for path in (run / FILE, run / "metrics.jsonl", *newest)]
    # A folder in a bucket has no modification time.
    times = [path.stat().mtime for path in paths if path.exists() and not (in_bucket(path) and path.is_dir())]
    return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else None
