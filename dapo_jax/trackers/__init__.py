"""Metrics trackers: JSON lines are always written, the trackers in `log.trackers` are optional.

A tracker receives one dict of numbers per step. The package of an optional tracker is imported when the tracker is created. A tracker of your own is a class with
the methods of `Tracker`. Its constructor may have any of the parameters `run_dir`, `resume_step` and `config` (see `opened`). It may also have these members:
`FILES`, the names of its files in the run's folder, `check(run_dir)`, which raises a ValueError if the tracker cannot be opened, and `described()`, a line for `dapo-jax doctor`.
"""

import importlib.util
import inspect
import math
import netrc
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from dapo_jax.config import LogConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.hints import did_you_mean, how_to_install
from dapo_jax.rewards.functions import load_function
from dapo_jax.storage import AnyPath, in_bucket, path_of, write_whole
from dapo_jax.trackers.json_lines import JsonlTracker, read_metrics, writing

__all__ = ["JsonlTracker", "MultiTracker", "TensorBoardTracker", "Tracker", "WandbTracker", "read_metrics"]


@runtime_checkable
class Tracker(Protocol):
    """Stores metrics. Steps must increase, and each step is logged once."""

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Stores the metrics of one step."""

    def close(self) -> None:
        """Writes buffered metrics and closes files. It may be called more than once."""


class TensorBoardTracker:
    """Writes metrics as scalars to a TensorBoard event file. When `log` returns, the step has been written. tensorboardX does not need TensorFlow.

    tensorboardX's `SummaryWriter` is not used, because its queue blocks forever after a full disk has terminated its writer thread.

    Args:
        run_dir: the events are written to RUN_DIR/tensorboard.
        resume_step: the step of the checkpoint from which a run resumes. TensorBoard then ignores later steps in earlier event files.
            None means a new run.

    Raises:
        ImportError: tensorboardX (`tensorboard` extra) is not installed.
        OSError: the event file cannot be written; the message names the folder.
    """

    FILES = ("tensorboard",)

    def __init__(self, run_dir: str | PathLike[str], resume_step: int | None = None) -> None:
        files = importlib.import_module("tensorboardX.event_file_writer")
        records = importlib.import_module("tensorboardX.record_writer")
        self._events = importlib.import_module("tensorboardX.proto.event_pb2")
        self.folder = os.path.join(run_dir, "tensorboard")
        records.directory_check(self.folder)
        # The default name has a timestamp in whole seconds, so a resume within the same second would overwrite the previous file.
        suffix = f".{os.getpid()}.{time.time_ns()}"
        self._writer = files.EventsWriter(os.path.join(self.folder, "events"), suffix)
        self._closed = False
        if resume_step is not None:
            self._write(step=resume_step + 1, session_log={"status": "START"})

    @staticmethod
    def check(run_dir: str) -> None:
        """Raises ValueError if the package is missing, or the run is in a bucket."""
        _check_package("tensorboard", "tensorboardX")
        if in_bucket(run_dir):
            raise ValueError(
                f"run_dir={run_dir}: TensorBoard appends to files, which is not possible in a bucket; use wandb if you need charts"
            )

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Writes one scalar per metric. Values that are nan or infinite are left out, so TensorBoard shows gaps."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        values = [{"tag": name, "simple_value": value} for name, value in finite.items()]
        self._write(step=step, summary={"value": values})

    def close(self) -> None:
        """Closes the event file."""
        if not self._closed:
            self._closed = True
            self._writer.close()

    def _write(self, **event: Any) -> None:
        with writing("TensorBoard events", Path(self.folder)):
            self._writer.write_event(self._events.Event(wall_time=time.time(), **event))
            self._writer.flush()


class WandbTracker:
    """One Weights & Biases run, new or continued. The environment variables WANDB_MODE (online, offline, disabled) and WANDB_PROJECT apply.

    The horizontal axis of charts is a metric `step`, because wandb's own step counter cannot go back when a resumed run repeats steps.

    Args:
        run_dir: wandb stores its files in RUN_DIR/wandb, and the name of RUN_DIR becomes the run's name. For a run in a bucket,
            the files are in WANDB_DIR or, if it is not set, in ./wandb.
        config: the configuration as YAML, shown with the charts.

    The file wandb_run_id in RUN_DIR has the id of the W&B run. A resumed run continues the charts of this id.

    Raises:
        ImportError: wandb (`wandb` extra) is not installed.
    """

    FILES = ("wandb", "wandb_run_id")

    def __init__(self, run_dir: str | PathLike[str], config: str = "") -> None:
        wandb = importlib.import_module("wandb")
        folder = path_of(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "wandb_run_id"
        run_id = kept.read_text().strip() if kept.exists() else None
        self._run = wandb.init(
            project=wandb_project(),
            dir=None if in_bucket(folder) else str(folder),
            id=run_id,
            name=folder.name if in_bucket(folder) else folder.resolve().name,
            resume=None if run_id is None else "allow",
            config={"yaml": config},
            settings=wandb.Settings(console="off"),  # otherwise wandb logs every redraw of the live view
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        write_whole(kept, self._run.id.encode())

    @staticmethod
    def check(run_dir: str) -> None:
        """Raises ValueError if the package or an API key is missing."""
        _check_package("wandb", "wandb")
        if wandb_mode() == "online" and not has_wandb_key():
            raise ValueError(
                "needs a Weights & Biases API key: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            )

    @staticmethod
    def described() -> str:
        """Returns the project, or the mode."""
        if (mode := wandb_mode()) != "online":
            return f"Weights & Biases, with WANDB_MODE={mode}"
        return f"Weights & Biases, project {wandb_project()}; an API key was found but not tested"

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Queues the metrics of one step, which wandb sends in the background."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Waits until all rows are written or sent."""
        self._run.finish()


class MultiTracker:
    """Passes metrics to several trackers, in order."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Logs to each tracker in order. If a tracker raises an error, the later trackers do not log the step."""
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Closes all trackers. If closing a tracker fails, the others are still closed before the error is raised."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):  # because an ExitStack closes in reverse order
                stack.callback(tracker.close)


BUILT_IN: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
"""The trackers of this package, by the names that `log.trackers` accepts."""


def tracker_classes(log: LogConfig) -> dict[str, Callable[..., Tracker]]:
    """Returns the classes in `log.trackers` by their names. Raises ConfigError if there is no such tracker."""
    found = dict[str, Callable[..., Tracker]]()
    for name in log.trackers:
        with prefixed("log.trackers"):
            if name not in BUILT_IN and ":" not in name:
                raise ValueError(
                    f"no tracker is named {name!r}; {did_you_mean(name, BUILT_IN)}, or write my.py:Class"
                )
            found[name] = BUILT_IN[name] if name in BUILT_IN else load_function(name)
    return found


def check_trackers(log: LogConfig, run_dir: str) -> None:
    """Checks that the configured trackers can be opened, without opening them. Raises ConfigError if there is no such tracker, or its `check` failed; the
    message contains the remedy."""
    for name, tracker in tracker_classes(log).items():
        with prefixed(f"log.trackers={name}"):
            getattr(tracker, "check", lambda run_dir: None)(run_dir)


def opened(
    tracker: Callable[..., Tracker], run_dir: AnyPath, *, resume_step: int | None, config: str
) -> Tracker:
    """Calls `tracker`, a class or a function that returns a tracker, with the other arguments whose names are among its parameters. A new run has no `resume_step`,
    and `config` is the configuration as YAML."""
    arguments = {"run_dir": run_dir, "resume_step": resume_step, "config": config}
    names = inspect.signature(tracker).parameters
    return tracker(**{name: value for name, value in arguments.items() if name in names})


def _check_package(extra: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"needs the package {package}, which is not installed: {how_to_install(extra)}")


def wandb_mode() -> str:
    """Returns WANDB_MODE, or `online` if it is not set."""
    return os.environ.get("WANDB_MODE") or "online"


def wandb_project() -> str:
    """Returns WANDB_PROJECT, or `dapo_jax` if it is not set."""
    return os.environ.get("WANDB_PROJECT") or "dapo_jax"


def has_wandb_key() -> bool:
    """Returns whether the environment or the netrc file contains an API key. The key is not verified."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
