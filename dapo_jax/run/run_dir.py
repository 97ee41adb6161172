"""The folder of a run: who may write there, what a run may find there, and what `overwrite` removes."""

import json
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest

from etils import epath

from dapo_jax import locks
from dapo_jax.config import ConfigError, TrainConfig, load_config, to_yaml
from dapo_jax.config.loading import changed_keys
from dapo_jax.config.schema import FREE_TO_CHANGE
from dapo_jax.locks import Lock, Lost
from dapo_jax.nearest import nearest
from dapo_jax.parallel.gather import all_gather_bytes, by_first
from dapo_jax.run.folders import locked, place_of
from dapo_jax.run.prompt_sets import dated
from dapo_jax.storage import AnyPath, entries, in_bucket
from dapo_jax.trackers.ready import check_trackers

OF_A_RUN = (
    locks.NAME,
    "checkpoints",
    "config.yaml",
    "evaluations",
    "metrics",
    "metrics.jsonl",
    "model",
    "post_mortem",
    "profile",
    "report.html",
    "rollouts",
    "status.json",
    "tensorboard",
    "wandb",
    "wandb_run_id",
)
"""Names of all that a run writes into its folder, and of a report's page."""


def remove_run(run_dir: AnyPath) -> bytes:
    """Removes what a run wrote to `run_dir`, which was checked to hold nothing else; the lock that this run holds stays."""
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
    """Locks and checks the run's folder in the first process, which is the one that writes there, and compares all processes' configurations.

    Args:
        config: the run's.
        resume: go on with the run in the folder.
        overwrite: the run in the folder is to be removed, by `remove_run`.
        held: takes the lock, which it releases when it is closed.
        lost: called with an exit status and a message if a lease in a bucket is lost.

    Returns:
        The folder; the configuration with the day on which the run began and the size of its waves; the lock, which only the first process has.

    Raises:
        ConfigError: in every process.
    """
    taken: list[Lock] = []

    def checked() -> bytes:
        check_trackers(config.log)  # before the lock, which makes the folder
        place = place_of(config.run_dir, key="run_dir", write=True)
        # First of all: what is looked for below, another run could be writing.
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
    """Refuses to write over a run unless told to, or to resume one under another configuration, or one that is not there.

    Raises:
        ConfigError: `run_dir` holds a run and neither `resume` nor `overwrite` is True, or with `overwrite` what no run wrote; `resume`
            would change what the run learns, or there is none and one of almost this name lies beside; TensorBoard's events
            would have to be appended to in a bucket; or something that is no folder, or a link to nothing, lies where the run needs one.
    """
    if resume and overwrite:
        raise ConfigError("resume=True goes on with a run and overwrite=True removes it; give one of them")
    if config.log.tensorboard and in_bucket(run_dir):
        raise ConfigError(
            f"log.tensorboard=true with run_dir={config.run_dir}: TensorBoard's events are appended to a file, and objects "
            "in a bucket cannot be; set log.tensorboard=false (metrics are kept all the same) or log.wandb=true"
        )
    for name in ("checkpoints", "evaluations", "model", "rollouts"):
        if problem := _unusable(run_dir / name):
            raise ConfigError(f"run_dir={config.run_dir}: {name} {problem}")
    kept = run_dir / "config.yaml"
    if overwrite:
        if strange := [place.name for place in entries(run_dir) if place.name not in OF_A_RUN]:
            raise ConfigError(
                f"overwrite=True with run_dir={config.run_dir}: it holds {strange[0]!r}, which no run wrote; move that away, or "
                "choose another run_dir"
            )
        return
    begun = kept.exists() or any(path.name.isdigit() for path in entries(run_dir / "checkpoints"))
    if begun and not resume:
        raise ConfigError(
            f"run_dir={config.run_dir} already holds a run; resume it with --resume (from Python: resume=True, or "
            "overwrite=True to begin anew), or choose another run_dir"
        )
    empty = all(place.name == locks.NAME for place in entries(run_dir))
    if resume and empty and (near := _run_beside(run_dir)):
        raise ConfigError(
            f"run_dir={config.run_dir}: there is no run to resume, but one in {near}; name that one, or leave --resume out "
            "to begin a new run"
        )
    learnt = any(path.name.removesuffix(".damaged").isdigit() for path in entries(run_dir / "checkpoints"))
    if kept.exists() and learnt:  # before the first checkpoint nothing was learnt under another configuration
        changed = changed_keys(load_config(kept).resolved(), config.resolved())
        bad = {key: pair for key, pair in changed.items() if not key.startswith(FREE_TO_CHANGE)}
        if "" in bad.get("data.template_date", ()):
            # A run of before days were kept has none, and who only asks has none yet.
            del bad["data.template_date"]
        if bad:
            lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in bad.items())
            raise ConfigError(
                f"resuming {config.run_dir} under another configuration would change the run: {lines}"
            )


def _unusable(place: AnyPath) -> str:
    """Why a run cannot use the folder `place`, which may not be there yet; empty if it can."""
    if os.path.islink(place) and not os.path.exists(place):
        return f"is a link to {os.readlink(place)}, which is not there: mount its disk, or remove the link to do without what it led to"
    if place.is_file() or (os.path.lexists(place) and not os.path.isdir(place)):
        return "is a file, and the run needs a folder there: move it away"
    if os.path.isdir(place) and not os.access(place, os.R_OK | os.X_OK):
        return "cannot be listed by this user: let it read there"
    return ""


def _run_beside(run_dir: AnyPath) -> AnyPath | None:
    """The run beside `run_dir` whose name is almost the same; another number, as of a seed, is another run."""
    runs = {place.name: place for place in entries(run_dir.parent) if (place / "config.yaml").is_file()}
    alike = [name for name in runs if re.findall(r"\d+", name) == re.findall(r"\d+", run_dir.name)]
    return next((runs[name] for name in nearest(run_dir.name, alike, least=0.75)), None)
