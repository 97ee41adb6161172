"""Metrics trackers: JSON lines are always written, TensorBoard and Weights & Biases are optional.

A tracker receives one dict of numbers per step. The package of an optional tracker is imported when the tracker is created.
"""

import importlib.util
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, runtime_checkable

from dapo_jax.config import ConfigError, LogConfig
from dapo_jax.hints import how_to_install
from dapo_jax.trackers.json_lines import JsonlTracker, read_metrics, writing
from dapo_jax.trackers.wandb import WandbTracker, has_wandb_key, wandb_mode

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

    def __init__(self, folder: str | os.PathLike[str], resume_step: int | None = None) -> None:
        files = importlib.import_module("tensorboardX.event_file_writer")
        records = importlib.import_module("tensorboardX.record_writer")
        self._events = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboardX.proto.summary_pb2")
        self.folder = str(folder)
        records.directory_check(self.folder)
        # The default name has a timestamp in whole seconds, so a resume within the same second would overwrite the previous file.
        suffix = f".{os.getpid()}.{time.time_ns()}"
        self._writer = files.EventsWriter(os.path.join(self.folder, "events"), suffix)
        self._closed = False
        if resume_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(self._events.Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Writes one scalar per metric. Values that are nan or infinite are left out, so TensorBoard shows gaps."""
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        summary = self._summaries.Summary(value=values)
        self._write(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Closes the event file."""
        if not self._closed:
            self._closed = True
            self._writer.close()

    def _write(self, event: object) -> None:
        with writing("TensorBoard events", Path(self.folder)):
            self._writer.write_event(event)
            self._writer.flush()


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
    for key, wanted, package, extra in (
        ("log.tensorboard", log.tensorboard, "tensorboardX", "tensorboard"),
        ("log.wandb", log.wandb, "wandb", "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key}=true needs the package {package}, which is not installed: {how_to_install(extra)}, or set {key}=false"
            )
    if log.wandb and wandb_mode() == "online" and not has_wandb_key():
        raise ConfigError(
            "log.wandb=true needs a Weights & Biases API key: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        )
