"""Folders that a configuration or a command names: access and locks; and the checks of a run's folder before it begins, or is removed by `overwrite`."""

import json
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from etils import epath

from dapo_jax import locks
from dapo_jax.config import ConfigError, TrainConfig, load_config, to_yaml
from dapo_jax.config.loading import changed_keys
from dapo_jax.config.schema import FREE_TO_CHANGE
from dapo_jax.hints import nearest
from dapo_jax.locks import Lock, LockedError, Lost, take
from dapo_jax.parallel.together import all_gather_bytes, by_first
from dapo_jax.run.prompt_sets import dated
from dapo_jax.storage import AnyPath, check_access, entries, in_bucket, path_of
from dapo_jax.trackers import check_trackers

OF_A_RUN = {
    *(locks.NAME, "config.yaml", "metrics.jsonl", "report.html", "status.json", "wandb_run_id"),
    *(
        "checkpoints",
        "evaluations",
        "metrics",
        "model",
        "post_mortem",
        "profile",
        "rollouts",
        "tensorboard",
        "wandb",
    ),
}
"""Names of all files and folders that a run writes into its folder, and of a report's page."""


def remove_run(run_dir: AnyPath) -> bytes:
    """Removes everything except the lock from `run_dir`, in which `check_run_dir` has found only files of a run."""
    for place in entries(run_dir):
        if place.name in OF_A_RUN and place.name != locks.NAME:
            if place.is_dir():
                place.rmtree() if isinstance(place, epath.Path) else shutil.rmtree(place)
            else:
                place.unlink()
    return b""


def claim_run_dir(
    config: TrainConfig, *, resume: bool, overwrite: bool, held: ExitStack, lost: Lost
) -> tuple[AnyPath, TrainConfig, Lock | None]:
    """Locks and checks the run's folder in the first process, which writes there, and compares all processes' configurations.

    Args:
        config: of the run.
        resume: continue the run in the folder.
        overwrite: the run in the folder will be removed by `remove_run`.
        held: takes the lock, and releases it when it is closed.
        lost: see `dapo_jax.locks.Lost`.

    Returns:
        The folder; the configuration with the day on which the run began and the size of its waves; the lock, in the first process.

    Raises:
        ConfigError: in every process.
    """
    taken: list[Lock] = []

    def checked() -> bytes:
        check_trackers(config.log)  # before the lock, which makes the folder
        place = place_of(config.run_dir, key="run_dir", write=True)
        # Before the checks below: another run could be writing.
        taken.append(held.enter_context(locked(place, value=config.run_dir, key="run_dir", lost=lost)))
        begun = resume and (place / "config.yaml").exists()
        day = dated(
            config.data, like=load_config(place / "config.yaml").data if begun else None
        ).template_date
        check_run_dir(place, _dated(config, day), resume=resume, overwrite=overwrite)
        return json.dumps([to_yaml(config), day]).encode()

    firsts, day = json.loads(by_first(checked))
    lines = zip_longest(firsts.splitlines(), to_yaml(config).splitlines())
    differing = [pair for pair in lines if pair[0] != pair[1]]
    for process, found in enumerate(all_gather_bytes(json.dumps(differing[:1]).encode())):
        for theirs, own in json.loads(found):
            raise ConfigError(
                f"all processes need one configuration; the first has {theirs!r} where process {process} has {own!r}"
            )
    run_dir = place_of(config.run_dir, key="run_dir", write=False)
    return run_dir, _dated(config, day), taken[0] if taken else None


def _dated(config: TrainConfig, day: str) -> TrainConfig:
    return replace(config.resolved(), data=replace(config.data, template_date=day))


def check_run_dir(run_dir: AnyPath, config: TrainConfig, *, resume: bool, overwrite: bool = False) -> None:
    """Checks that a run may begin or resume in `run_dir`.

    Raises:
        ConfigError: `run_dir` holds a run and neither `resume` nor `overwrite` is True; with `overwrite`, it holds a file that no run
            wrote; with `resume`, the configuration would change what the run learns, or the folder is empty and a run of almost
            this name exists; or a file, or a link to nothing, has the name of a folder that the run needs.
    """
    if resume and overwrite:
        raise ConfigError("resume=True continues a run and overwrite=True removes it; give one of them")
    if config.log.tensorboard and in_bucket(run_dir):
        raise ConfigError(
            f"log.tensorboard=true with run_dir={config.run_dir}: TensorBoard's events are appended to a file, and objects "
            "in a bucket cannot be; set log.tensorboard=false (metrics are kept all the same) or log.wandb=true"
        )
    for name in ("checkpoints", "evaluations", "model", "rollouts"):
        if not (run_dir / name).is_dir() and os.path.lexists(run_dir / name):
            raise ConfigError(
                f"run_dir={config.run_dir}: {name} is a file or a link to a missing folder, and the run needs a folder there: mount "
                "its disk, or move it away"
            )
    kept = run_dir / "config.yaml"
    if overwrite:
        if strange := [place.name for place in entries(run_dir) if place.name not in OF_A_RUN]:
            raise ConfigError(
                f"overwrite=True with run_dir={config.run_dir}: it holds {strange[0]!r}, which no run wrote; move it away, or "
                "choose another run_dir"
            )
        return
    saved = [path.name.removesuffix(".damaged") for path in entries(run_dir / "checkpoints")]
    has_saved = any(map(str.isdigit, saved))
    if (kept.exists() or has_saved) and not resume:
        raise ConfigError(
            f"run_dir={config.run_dir} already holds a run; resume it with --resume (from Python: resume=True, or "
            "overwrite=True to start over), or choose another run_dir"
        )
    empty = all(place.name == locks.NAME for place in entries(run_dir))
    if resume and empty and (near := _similar_run(run_dir)):
        raise ConfigError(
            f"run_dir={config.run_dir}: there is no run to resume, but one in {near}; name that one, or leave --resume out "
            "to begin a new run"
        )
    if kept.exists() and has_saved:  # before the first checkpoint any key may change
        changed = changed_keys(load_config(kept).resolved(), config.resolved())
        bad = {key: pair for key, pair in changed.items() if not key.startswith(FREE_TO_CHANGE)}
        if "" in bad.get("data.template_date", ()):
            del bad["data.template_date"]  # doctor asks before the day is known
        if bad:
            lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in bad.items())
            raise ConfigError(
                f"resuming {config.run_dir} under another configuration would change the run: {lines}"
            )


def _similar_run(run_dir: AnyPath) -> AnyPath | None:
    """Returns a run in the same folder whose name differs by a few characters, but not in a number such as a seed."""
    runs = {place.name: place for place in entries(run_dir.parent) if (place / "config.yaml").is_file()}
    alike = [name for name in runs if re.findall(r"\d+", name) == re.findall(r"\d+", run_dir.name)]
    return next((runs[name] for name in nearest(run_dir.name, alike, least=0.75)), None)


def place_of(value: str | AnyPath, *, key: str, write: bool) -> AnyPath:
    """Returns the folder that `value` names, and checks access. A local one is absolute: a reward function may change the working folder.

    Args:
        value: a local path, or `gs://BUCKET/FOLDER`.
        key: the key of the value in the message.
        write: whether something will be written there.

    Raises:
        ConfigError: gcsfs is not installed, there is no such bucket, or nothing can be written there.
    """
    try:
        folder = path_of(value)
        folder.exists()  # raises for a name that the file system does not take
        check_access(folder, write=write)
        return folder if in_bucket(folder) else Path(folder).absolute()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}={value}: {error}") from error


def locked(folder: AnyPath, *, value: str, key: str, lost: Lost) -> Lock:
    """Takes the lock of a folder from `place_of` (arguments as there), before anything is read or written in it; makes the folder if necessary.

    Raises:
        ConfigError: another process has it, or the folder cannot be written.
    """
    try:
        return take(folder, lost=lost)
    except LockedError as error:
        raise ConfigError(f"{key}={value}: {error}") from error
