"""Sends metrics to Weights & Biases. The environment variables WANDB_MODE (online, offline, disabled) and WANDB_PROJECT apply."""

import importlib
import netrc
import os
from collections.abc import Mapping
from os import PathLike
from typing import Any
from urllib.parse import urlsplit

from dapo_jax.storage import in_bucket, path_of


class WandbTracker:
    """One Weights & Biases run, new or continued.

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
