"""Writes the configuration, metrics and rollouts of a run, and configures the compilation cache."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
import numpy as np

from dapo_jax.config import ConfigError, TrainConfig, to_yaml
from dapo_jax.config.algorithms import algorithm_name
from dapo_jax.config.loading import RECORD
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.run.observers import TokenRatios
from dapo_jax.run.run_dir import checked_folder
from dapo_jax.run.training_pass import ResponseAdvantages
from dapo_jax.storage import AnyPath, in_bucket, write_whole
from dapo_jax.trackers import MultiTracker, Tracker, opened, tracker_classes
from dapo_jax.trackers.json_lines import JsonlTracker, read_metrics
from dapo_jax.trackers.rollout_log import LOGGED_GROUPS, Decode, format_rollouts, write_rollouts


def compilation_cache() -> str:
    """Returns the folder (local or in a bucket) in which JAX stores compiled programs for later processes: `JAX_COMPILATION_CACHE_DIR`, or ~/.cache/dapo_jax/xla
    if this variable is not set. If it is empty, nothing is stored."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    return "~/.cache/dapo_jax/xla" if folder is None else folder


def use_compilation_cache() -> None:
    """Makes JAX store compiled programs in `compilation_cache()`. Raises ConfigError if the folder is in a bucket and cannot be written to."""
    if not (folder := compilation_cache()):
        return
    # Write access to a local folder is not checked, because JAX warns if writing fails.
    path = checked_folder(folder, key="JAX_COMPILATION_CACHE_DIR", write=in_bucket(folder))
    jax.config.update("jax_compilation_cache_dir", str(path))
    if in_bucket(path):
        # On GPUs, XLA's own cache supports only local files.
        jax.config.update("jax_persistent_cache_enable_xla_caches", None)
    # By default, JAX does not cache programs that compile quickly, but a small run has dozens of them. A lower value set by the user is kept.
    shortest = "jax_persistent_cache_min_compile_time_secs"
    jax.config.update(shortest, min(0.1, getattr(jax.config, shortest)))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def write_config(config: TrainConfig, run_dir: AnyPath) -> None:
    """Writes config.yaml. Its first line is a comment with the name of the algorithm."""
    text = f"# algorithm: {algorithm_name(config)}\n{to_yaml(config)}"
    write_whole(run_dir / RECORD, text.encode())


class Records(AbstractContextManager):
    """The trackers and the rollout log of a run, as a context manager."""

    def __init__(
        self, config: TrainConfig, run_dir: AnyPath, *, resume_step: int | None, decode: Decode | None = None
    ) -> None:
        """Opens the trackers. If `resume_step` is given, metrics of later steps are removed from metrics.jsonl. See `format_rollouts` for `decode`. Raises
        ConfigError if metrics.jsonl is damaged, or belongs to another run."""
        self._config, self._decode = config, decode
        self._run_dir = run_dir
        self._path = run_dir / "metrics.jsonl"
        try:
            trackers: list[Tracker] = [JsonlTracker(self._path, resume_step=resume_step)]
        except (ValueError, IsADirectoryError) as error:
            raise ConfigError(
                f"run_dir={config.run_dir}: {error}; repair the file, or move it away and resume without its metrics"
            ) from error
        with ExitStack() as undo:
            undo.callback(lambda: MultiTracker(trackers).close())
            for tracker in tracker_classes(config.log).values():
                trackers.append(opened(tracker, run_dir, resume_step=resume_step, config=to_yaml(config)))
            undo.pop_all()
        self._trackers = MultiTracker(trackers)

    def step(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Writes the metrics of one step."""
        self._trackers.log(step, metrics)

    def rollouts(
        self, step: int, collected: Collected, ratios: TokenRatios, advantages: ResponseAdvantages
    ) -> None:
        """Writes the rollouts of a step if this step is logged, both as JSON lines and as readable text."""
        if not self._config.logs_rollouts(step):
            return
        groups = collected.logged(LOGGED_GROUPS)
        keys = [(group.prompt.ordinal, index) for group in groups for index, _ in group.indexed]
        written = write_rollouts(
            self._run_dir / "rollouts",
            step,
            groups,
            advantages=np.array([advantages.get(key, np.nan) for key in keys]),
            ratios=ratios,
        )
        text = format_rollouts(groups, metric=self._config.dynamic_sampling.metric, decode=self._decode)
        write_whole(written.with_suffix(".txt"), text.encode("utf-8", errors="replace"))

    def read(self) -> list[dict[str, Any]]:
        """Returns all lines of metrics.jsonl, or an empty list if the file does not exist yet."""
        try:
            return read_metrics(self._path)
        except FileNotFoundError:
            return []

    def __exit__(self, *_: object) -> None:
        self._trackers.close()
