"""Opens and locks the folders that a configuration or command specifies, and checks a run's folder before the run starts."""

import json
import os
import re
import shutil
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from etils import epath

from dapo_jax.config import ConfigError, TrainConfig, load_config, to_yaml
from dapo_jax.config.keys import prefixed
from dapo_jax.config.loading import changed_keys
from dapo_jax.config.model_source import source_parts
from dapo_jax.config.schema import FREE_TO_CHANGE
from dapo_jax.hints import nearest
from dapo_jax.parallel.together import all_gather_bytes, by_first
from dapo_jax.run.prompt_sets import with_template_date
from dapo_jax.storage import AnyPath, check_access, entries, in_bucket, locks, path_of
from dapo_jax.storage.locks import Lock, LockedError, Lost, take
from dapo_jax.trackers import TensorBoardTracker, WandbTracker, check_trackers, tracker_classes

OF_A_RUN = {
    locks.NAME, "config.yaml", "metrics.jsonl", "report.html", "status.json", "checkpoints", "evaluations", "metrics", "model",
    "post_mortem", "profile", "rollouts", *TensorBoardTracker.FILES, *WandbTracker.FILES,
}  # fmt: skip
"""Names of all files and folders in a run's folder, including the page of `dapo-jax report`."""


def remove_run(run_dir: AnyPath) -> bytes:
    """Removes the files of a run from `run_dir`, except the lock. Call `check_run_dir` first, because it rejects a folder that contains other files."""
    for entry in entries(run_dir):
        if entry.name in OF_A_RUN and entry.name != locks.NAME:
            _remove(entry)
    return b""


def remove_steps_after(step: int, folder: AnyPath) -> None:
    """Removes the files and folders in `folder` of later steps. A resumed run has not reached them, and may never write them again."""
    for entry in entries(folder):
        found = re.fullmatch(r"step_([0-9]+)(?:\.\w+)?", entry.name)
        if found and int(found[1]) > step:
            _remove(entry)


def _remove(entry: AnyPath) -> None:
    if entry.is_dir():
        entry.rmtree() if isinstance(entry, epath.Path) else shutil.rmtree(entry)
    else:
        entry.unlink()


def claim_run_dir(
    config: TrainConfig, *, resume: bool, overwrite: bool, held: ExitStack, lost: Lost
) -> tuple[AnyPath, TrainConfig, Lock | None]:
    """Locks and checks the run's folder in the first process, and checks that all processes have the same configuration. The lock is released with `held`. The run in the
    folder will be continued (`resume`), or removed by `remove_run` (`overwrite`). Raises ConfigError in every process if a check failed.

    Returns the folder, the configuration and the lock (None in all processes except the first). The configuration contains the date on which the run began, and its
    `prompts_per_wave` is resolved.
    """
    taken: list[Lock] = []

    def checked() -> bytes:
        check_trackers(config.log, config.run_dir)  # must come before locking, which creates the folder
        folder = checked_folder(config.run_dir, key="run_dir", write=True)
        # The checks below need the lock, because another run could be writing to the folder.
        taken.append(held.enter_context(locked(folder, value=config.run_dir, key="run_dir", lost=lost)))
        kept = folder / "config.yaml"
        like = load_config(kept).data if resume and kept.exists() else None
        day = with_template_date(config.data, like=like).template_date
        check_run_dir(folder, _dated(config, day), resume=resume, overwrite=overwrite)
        return json.dumps([to_yaml(config), day]).encode()

    firsts, day = json.loads(by_first(checked))
    lines = zip_longest(firsts.splitlines(), to_yaml(config).splitlines())
    differing = [pair for pair in lines if pair[0] != pair[1]]
    for process, differences in enumerate(all_gather_bytes(json.dumps(differing[:1]).encode())):
        for theirs, own in json.loads(differences):
            raise ConfigError(
                f"all processes need the same configuration; the first process has {theirs!r}, but process {process} has {own!r}"
            )
    run_dir = checked_folder(config.run_dir, key="run_dir", write=False)
    return run_dir, _dated(config, day), taken[0] if taken else None


def _dated(config: TrainConfig, day: str) -> TrainConfig:
    return replace(config.resolved(), data=replace(config.data, template_date=day))


def check_run_dir(run_dir: AnyPath, config: TrainConfig, *, resume: bool, overwrite: bool = False) -> None:
    """Checks that a run may start or resume in `run_dir`.

    Raises:
        ConfigError: `run_dir` contains a run, but neither `resume` nor `overwrite` is True; or a file or a broken link is in place of a folder
            that the run needs. If `overwrite` is True: the folder contains a file that runs do not write. If `resume` is True: a changed key
            in the configuration would affect training, or the folder is empty and there is a run with a similar name.
    """
    if resume and overwrite:
        raise ConfigError("resume=True continues a run, but overwrite=True removes it; set only one of them")
    for name in ("checkpoints", "evaluations", "model", "rollouts"):
        if not (run_dir / name).is_dir() and os.path.lexists(run_dir / name):
            raise ConfigError(
                f"run_dir={config.run_dir}: {name} is a file or a link to a missing folder, but the run needs a folder there: mount "
                "its disk, or move it away"
            )
    kept = run_dir / "config.yaml"
    if overwrite:
        removed = f"{_absolute(config.run_dir)}/"
        for key, source in (("model", config.model.source), ("teacher", config.teacher.source)):
            if any(f"{path}/".startswith(removed) for path in _origins(source)):
                raise ConfigError(
                    f"overwrite=True with run_dir={config.run_dir}: {key}.source={source} needs this folder, which would be removed; "
                    "choose another run_dir"
                )
        known = OF_A_RUN.union(
            *(getattr(tracker, "FILES", ()) for tracker in tracker_classes(config.log).values())
        )
        if strange := [entry.name for entry in entries(run_dir) if entry.name not in known]:
            raise ConfigError(
                f"overwrite=True with run_dir={config.run_dir}: it contains {strange[0]!r}, which was not written by a run; move it "
                "away, or choose another run_dir"
            )
        return
    saved = [path.name.removesuffix(".damaged") for path in entries(run_dir / "checkpoints")]
    has_saved = any(map(str.isdigit, saved))
    if (kept.exists() or has_saved) and not resume:
        raise ConfigError(
            f"run_dir={config.run_dir} already contains a run; resume it with --resume (from Python: resume=True, or "
            "overwrite=True to start over), or choose another run_dir"
        )
    empty = all(entry.name == locks.NAME for entry in entries(run_dir))
    if resume and empty and (similar := _similar_run(run_dir)):
        raise ConfigError(
            f"run_dir={config.run_dir}: there is no run to resume, but there is a run in {similar}; use that run_dir, or omit "
            "--resume to start a new run"
        )
    if kept.exists() and has_saved:  # without a checkpoint, the run starts over, so any key may change
        began = load_config(kept).resolved()
        changed = changed_keys(began, config.resolved())
        bad = {key: pair for key, pair in changed.items() if not key.startswith(FREE_TO_CHANGE)}
        if "" in bad.get("data.template_date", ()):
            del bad["data.template_date"]  # `dapo-jax doctor` leaves the date empty
        if bad:
            lines = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in bad.items())
            why = f"resuming {config.run_dir} under another configuration would change the run"
            raise ConfigError(f"{why}: {lines}")
        _check_decay(began, config, done=max(int(name) for name in saved if name.isdigit()))


def _check_decay(began: TrainConfig, config: TrainConfig, *, done: int) -> None:
    """Checks that a run in which the learning rate decays, and whose last saved step is `done`, resumes with its number of steps, or before the decay."""
    before = min(each.optimizer.steps_before_decay(each.steps) for each in (began, config))
    if config.optimizer.schedule != "constant" and config.steps != began.steps and done > before:
        raise ConfigError(
            f"resuming {config.run_dir} with steps={config.steps}: it was {began.steps}, step {done} is saved, and the decay of the learning rate "
            f"begins after step {before} with one of the two; set steps={began.steps}"
        )


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _origins(source: str) -> list[str]:
    """Returns the absolute paths of a source and, if it is a run, of the runs and the model from which it started."""
    origins = list[str]()
    while (path := _absolute(source_parts(source).place)) not in origins:
        origins.append(path)
        with suppress(ValueError):  # loading the source will raise this error with its key
            kept = path_of(path) / "config.yaml"
            if kept.is_file() and (kept.parent / "checkpoints").is_dir():
                source = load_config(kept).model.source
    return origins


def _similar_run(run_dir: AnyPath) -> AnyPath | None:
    """Returns a run in the same parent folder with a similar name, or None. Numbers in the name, such as a seed, must be the same."""
    runs = {folder.name: folder for folder in entries(run_dir.parent) if (folder / "config.yaml").is_file()}
    alike = [name for name in runs if re.findall(r"\d+", name) == re.findall(r"\d+", run_dir.name)]
    return next((runs[name] for name in nearest(run_dir.name, alike, least=0.75)), None)


def checked_folder(value: str | AnyPath, *, key: str, write: bool) -> AnyPath:
    """Converts the `value` of a configuration key (a local path, or `gs://BUCKET/FOLDER`) to a folder, and checks read access or, with `write`, write access.
    A local path becomes absolute, because a reward function may call os.chdir. Raises ConfigError if gcsfs is not installed, the bucket does not exist, or the
    folder is not writable."""
    with prefixed(f"{key}={value}", OSError):
        folder = path_of(value)
        folder.exists()  # raises an error for a name that the file system does not allow
        check_access(folder, write=write)
        return folder if in_bucket(folder) else Path(folder).absolute()


def locked(folder: AnyPath, *, value: str, key: str, lost: Lost) -> Lock:
    """Acquires the lock on a folder that `checked_folder` returned, and creates the folder if necessary. Call it before reading or writing files in the folder.
    Raises ConfigError if another process has the lock, or the folder is not writable."""
    with prefixed(f"{key}={value}", LockedError):
        return take(folder, lost=lost)
