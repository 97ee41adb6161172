"""Metrics trackers: JSON lines are always written, TensorBoard and Weights & Biases are optional.

A tracker receives one dict of numbers per step. The package of an optional tracker is imported when the tracker is created.
"""

import importlib.util
import math
import netrc
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from dapo_jax.config import ConfigError, LogConfig
from dapo_jax.hints import how_to_install
from dapo_jax.storage import in_bucket, path_of
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
        folder: the TensorBoard log directory; created if needed.
        resume_step: the step of the checkpoint from which a run resumes. TensorBoard then ignores later steps in earlier event files.
            None means a new run.

    Raises:
        ImportError: tensorboardX (`tensorboard` extra) is not installed.
        OSError: the event file cannot be written; the message names the folder.
    """

    def __init__(self, folder: str | PathLike[str], resume_step: int | None = None) -> None:
        files = importlib.import_module("tensorboardX.event_file_writer")
        records = importlib.import_module("tensorboardX.record_writer")
        self._events = importlib.import_module("tensorboardX.proto.event_pb2")
        self.folder = str(folder)
        records.directory_check(self.folder)
        # The default name has a timestamp in whole seconds, so a resume within the same second would overwrite the previous file.
        suffix = f".{os.getpid()}.{time.time_ns()}"
        self._writer = files.EventsWriter(os.path.join(self.folder, "events"), suffix)
        self._closed = False
        if resume_step is not None:
            self._write(step=resume_step + 1, session_log={"status": "START"})

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
        run_id: `WandbTracker.run_id` of the run to continue, or None to start a new run.
        config: the resolved configuration, shown with the charts.

    Raises:
        ImportError: wandb (`wandb` extra) is not installed.
    """

    def __init__(self, run_dir: str | PathLike[str], run_id: str | None, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        folder = path_of(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=wandb_project(),
            dir=None if in_bucket(folder) else str(folder),
            id=run_id,
            name=folder.name if in_bucket(folder) else folder.resolve().name,
            resume=None if run_id is None else "allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),  # otherwise wandb logs every redraw of the live view
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @property
    def run_id(self) -> str:
        """The id of the wandb run. A resumed run passes this id to `WandbTracker` to continue the same charts."""
        return self._run.id

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


def check_trackers(log: LogConfig) -> None:
    """Checks that the configured trackers can be opened, without opening them.

    Raises:
        ConfigError: a package or an API key is missing; the message contains the remedy.
    """
    for name, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if getattr(log, name) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"log.{name}=true needs the package {package}, which is not installed: {how_to_install(name)}, or set log.{name}=false"
            )
    if log.wandb and wandb_mode() == "online" and not has_wandb_key():
        raise ConfigError(
            "log.wandb=true needs a Weights & Biases API key: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        )


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
