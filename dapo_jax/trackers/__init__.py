"""Metrics trackers: JSON lines are always written, TensorBoard and Weights & Biases are optional.

A tracker receives one dict of numbers per step. The package of an optional tracker is imported when the tracker is created.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol, runtime_checkable

from dapo_jax.config import ConfigError, LogConfig
from dapo_jax.hints import how_to_install
from dapo_jax.trackers.json_lines import JsonlTracker, read_metrics
from dapo_jax.trackers.tensorboard import TensorBoardTracker
from dapo_jax.trackers.wandb import WandbTracker, has_wandb_key, wandb_mode

__all__ = ["JsonlTracker", "MultiTracker", "TensorBoardTracker", "Tracker", "WandbTracker", "read_metrics"]


@runtime_checkable
class Tracker(Protocol):
    """Stores metrics. Steps must increase, and each step is logged once."""

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Stores the metrics of one step."""
        ...

    def close(self) -> None:
        """Writes buffered metrics and closes files. It may be called more than once."""
        ...


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
