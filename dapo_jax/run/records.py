"""The records of a run: metrics to the trackers, readable rollouts; and the compilation cache."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import jax
import numpy as np

from dapo_jax.config import ConfigError, TrainConfig, to_yaml
from dapo_jax.dapo.advantages import group_advantages
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.run.observers import TokenRatios
from dapo_jax.run.run_dir import place_of
from dapo_jax.storage import AnyPath, in_bucket, write_whole
from dapo_jax.trackers import (
    JsonlTracker,
    MultiTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    read_metrics,
)
from dapo_jax.trackers.rollout_log import LOGGED_GROUPS, format_rollouts, write_rollouts

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""W&B names folders after it."""


def use_compilation_cache(folder: str) -> None:
    """Keeps compiled programs in `folder`, which may be in a bucket, for later processes; an empty name does nothing.

    Raises:
        ConfigError: the folder is in a bucket and cannot be written to.
    """
    if not folder:
        return
    # For a local folder that cannot be written to, jax only warns.
    place = place_of(folder, key="compilation_cache", write=in_bucket(folder))
    jax.config.update("jax_compilation_cache_dir", str(place))
    if in_bucket(place):
        # On GPUs, XLA keeps a cache of its own, in local files only.
        jax.config.update("jax_persistent_cache_enable_xla_caches", None)
    # Also programs that compile in a moment: a small run has dozens of them. A lower setting of the user stays.
    shortest = "jax_persistent_cache_min_compile_time_secs"
    jax.config.update(shortest, min(0.1, getattr(jax.config, shortest)))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Records:
    """The trackers and the rollout log of one run; a context manager."""

    def __init__(self, config: TrainConfig, run_dir: AnyPath, *, resume_step: int | None) -> None:
        """Opens the trackers; with `resume_step`, later lines are cut from metrics.jsonl.

        Raises:
            ConfigError: metrics.jsonl is damaged, or of another run.
        """
        self._config = config
        self._log, self._run_dir, self._normalize_std = config.log, run_dir, config.loss.normalize_std
        self._metric = config.dynamic_sampling.metric
        self._path = run_dir / "metrics.jsonl"
        try:
            trackers: list[Tracker] = [JsonlTracker(self._path, resume_step=resume_step)]
        except (ValueError, IsADirectoryError) as error:
            raise ConfigError(
                f"run_dir={config.run_dir}: {error}; mend the file, or move it away and resume without its lines"
            ) from error
        with ExitStack() as undo:
            undo.callback(lambda: MultiTracker(trackers).close())
            if self._log.tensorboard:
                trackers.append(TensorBoardTracker(run_dir / "tensorboard", resume_step=resume_step))
            if self._log.wandb:
                trackers.append(self._wandb(config))
            undo.pop_all()
        self._trackers = MultiTracker(trackers)

    def _wandb(self, config: TrainConfig) -> WandbTracker:
        """Opens the W&B run of this folder: its id is kept there, so a resumed run continues it."""
        kept = self._run_dir / "wandb_run_id"
        run_id = kept.read_text().strip() if kept.exists() else None
        if run_id is not None and not _RUN_ID.fullmatch(run_id):
            raise ConfigError(
                f"{kept} holds {run_id!r:.80}, which is no id of a W&B run; remove the file, and a new run is started there"
            )
        tracker = WandbTracker(self._run_dir, run_id, {"yaml": to_yaml(config)})
        write_whole(kept, tracker.run_id.encode())
        return tracker

    def step(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Writes one step's metrics."""
        self._trackers.log(step, metrics)

    def rollouts(self, step: int, collected: Collected, ratios: TokenRatios) -> None:
        """Writes a step's rollouts if they are due: JSON lines for programs, text for people."""
        if not self._config.logs_rollouts(step):
            return
        groups = collected.logged(LOGGED_GROUPS)
        advantages = [
            group_advantages(group.rewards[None], normalize_std=self._normalize_std)[0] for group in groups
        ]
        written = write_rollouts(
            self._run_dir / "rollouts",
            step,
            groups,
            advantages=np.concatenate(advantages) if advantages else None,
            ratios=ratios,
        )
        count = sum(len(group.rollouts) for group in groups)
        text = format_rollouts(groups, limit=count, metric=self._metric)
        write_whole(written.with_suffix(".txt"), text.encode("utf-8", errors="replace"))

    def read(self) -> list[dict[str, Any]]:
        """Returns all lines of metrics.jsonl; a bucket has no such file before the first line."""
        try:
            return read_metrics(self._path)
        except FileNotFoundError:
            return []

    def __enter__(self) -> "Records":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trackers.close()
