"""Metrics as TensorBoard scalars, through tensorboardX (which needs no TensorFlow)."""

import importlib
import math
import os
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from dapo_jax.trackers.json_lines import writing


class TensorBoardTracker:
    """Writes one event file into a folder; a step is written when `log` returns.

    Events do not pass through tensorboardX's `SummaryWriter`, whose queue blocks forever after its thread has died of a full disk.

    Args:
        folder: the log directory of TensorBoard; created if needed.
        resume_step: the step of the checkpoint from which a run continues; TensorBoard then ignores later steps of earlier event files.
            None for a new run.

    Raises:
        ImportError: tensorboardX (extra `tensorboard`) is not installed.
        OSError: the event file cannot be written; the message names the folder.
    """

    def __init__(self, folder: str | PathLike[str], resume_step: int | None = None) -> None:
        files = importlib.import_module("tensorboardX.event_file_writer")
        records = importlib.import_module("tensorboardX.record_writer")
        self._events = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboardX.proto.summary_pb2")
        self.folder = str(folder)
        records.directory_check(self.folder)
        # The default name has whole seconds only, so a quick resume would overwrite the file before it.
        suffix = f".{os.getpid()}.{time.time_ns()}"
        self._writer = files.EventsWriter(os.path.join(self.folder, "events"), suffix)
        self._closed = False
        if resume_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(self._events.Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Writes one scalar per metric; nan and infinity are left out, which TensorBoard shows as gaps."""
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
