"""Writes metrics as TensorBoard scalars with tensorboardX, which does not need TensorFlow."""

import importlib
import math
import os
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from dapo_jax.trackers.json_lines import writing


class TensorBoardTracker:
    """Writes metrics to a TensorBoard event file. When `log` returns, the step has been written.

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
