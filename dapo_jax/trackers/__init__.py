"""Where metrics go: JSON lines always, TensorBoard and Weights & Biases when asked for.

A tracker takes one dict of numbers per step. Packages of the optional ones are imported when one is made.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol, runtime_checkable

from dapo_jax.trackers.jsonl import JsonlTracker, read_metrics
from dapo_jax.trackers.tensorboard import TensorBoardTracker
from dapo_jax.trackers.wandb import WandbTracker

__all__ = ["JsonlTracker", "MultiTracker", "TensorBoardTracker", "Tracker", "WandbTracker", "read_metrics"]


@runtime_checkable
class Tracker(Protocol):
    """Somewhere that keeps metrics. Steps only go up, and each is logged once."""

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Keeps the metrics of one step."""
        ...

    def close(self) -> None:
        """Writes out what is buffered and lets go of files; may be called twice."""
        ...


class MultiTracker:
    """Passes everything on to several trackers, in order."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Logs to each; an error ends the call, so put the tracker that must not miss a step first."""
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Closes all of them, also those after one that fails; then raises what was raised."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):  # a stack unwinds from its end
                stack.callback(tracker.close)
