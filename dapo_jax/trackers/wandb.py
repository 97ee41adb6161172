"""Metrics to Weights & Biases. The environment variable WANDB_MODE (online, offline, disabled) is respected.

A file of its own: its package is an extra.
"""

import importlib
from collections.abc import Mapping
from os import PathLike
from typing import Any

from dapo_jax.extras import how_to_install
from dapo_jax.storage import in_bucket, path_of


class WandbTracker:
    """One Weights & Biases run, new or continued.

    Charts run over a metric `step` rather than over wandb's own counter: that counter refuses to go back, and
    a resumed run replays the steps after its checkpoint.

    Args:
        project: name of the project.
        run_dir: wandb keeps its files in RUN_DIR/wandb; the folder's name becomes the run's name. Of a run in a bucket
            they are local all the same: in WANDB_DIR, or else in ./wandb.
        run_id: the run to continue, from `WandbTracker.run_id` of the run before; None starts a new one.
        config: the resolved configuration, shown beside the charts.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(
        self, project: str, run_dir: str | PathLike[str], run_id: str | None, config: Mapping[str, Any]
    ) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(f"log.wandb needs the package wandb: {how_to_install('wandb')}") from error
        folder = path_of(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            dir=None if in_bucket(folder) else str(folder),
            id=run_id,
            name=folder.name if in_bucket(folder) else folder.resolve().name,
            resume=None if run_id is None else "allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),  # or every redraw of the progress view lands in its log
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @property
    def run_id(self) -> str:
        """The id that is remembered, so that a resumed run goes on in the same charts."""
        return self._run.id

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Queues one row; wandb sends it in the background."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Waits until everything queued is written or sent."""
        self._run.finish()
