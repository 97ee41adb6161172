"""Saves and restores checkpoints. Saves are asynchronous and atomic; restores are verified and work on any mesh.

A checkpoint is saved at a step boundary and contains `state` (a pytree of JAX arrays), `progress` (a small JSON dict) and `carry` (host
arrays whose shapes vary from step to step). The state is stored as a flat dict of path -> array, so that the files do not depend on
the container classes of Flax or Optax.

Layout: FOLDER/STEP/{state,carry,meta,sha256.json}. A step is written under a temporary name and renamed when all files, including the
manifest, are complete. Objects in a bucket cannot be renamed, so there a step is complete once it contains commit_success.txt.
"""

import errno
import functools
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from dapo_jax.checkpoints import manifest
from dapo_jax.checkpoints.manifest import CheckpointError, DamagedError, unreadable
from dapo_jax.config import ConfigError
from dapo_jax.parallel.together import all_gather_bytes, broadcast_from_first, by_first
from dapo_jax.storage import file_bytes, in_bucket, path_of
from dapo_jax.text.plain_json import read_object

SCHEMA_VERSION = 1
"""Version of the layout above and of the `meta` item. Increase it for changes that older versions of dapo_jax cannot read."""

Check = Callable[[str, Mapping[str, Any]], None]
"""Called with a checkpoint's name (for messages) and its progress. Raises DamagedError, or ConfigError if the checkpoint belongs to another run."""

_Read = TypeVar("_Read")

_AGREED = (DamagedError, CheckpointError, ConfigError, ValueError)
"""Errors that are raised in all processes if they occur in one process. A subclass precedes its base class."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The content of one checkpoint."""

    step: int
    state: PyTree
    """The state, with the structure, dtypes and shardings of the target."""
    progress: dict[str, Any]
    carry: dict[str, np.ndarray]


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Saves and restores the checkpoints of one run. Every process of the run must make the same calls.

    Nothing is written before the first `save`, so a checkpointer can also read the folder of a run that another process is training.
    Leaving the context manager waits for the save in progress.

    Args:
        folder: the folder of all steps, local or in a bucket (see `dapo_jax.storage`).
        keep: number of most recent checkpoints to keep. At least 1.
        keep_best: also keep the checkpoint with the highest score. If several checkpoints share the highest score, the latest is kept.

    Raises:
        CheckpointError: `folder` cannot be listed.
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 3, keep_best: bool = False) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: to resume, a run needs a checkpoint")
        quiet_orbax()
        path = epath.Path(path_of(folder))
        self.folder = path if in_bucket(path) else path.resolve()  # resolve() does not support gs:// paths
        self._sealing = manifest.Sealing(self.folder)
        self._keep, self._keep_best = keep, keep_best
        manifest.step_folders(self.folder)
        meet, seal = self._sealing.meet, self._sealing.seal
        saving = ocp.AsyncOptions(barrier_sync_fn=meet, post_finalization_callback=seal)
        options = ocp.CheckpointManagerOptions(preservation_policy=self, create=False, async_options=saving)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(
        self,
        step: int,
        state: PyTree,
        progress: Mapping[str, Any],
        carry: Mapping[str, np.ndarray],
        *,
        score: float | None = None,
        measure: str = "",
    ) -> None:
        """Starts saving `step`. The files are written in the background.

        The caller may donate or overwrite `state` and `carry` as soon as this returns.

        Args:
            step: the last finished step. Must be larger than every saved step.
            state: a pytree of JAX arrays. Empty arrays are not allowed.
            progress: values that JSON can represent. Numbers must be finite.
            carry: host arrays of any shape and of any dtype except object. May be empty.
            score: a finite number that rates the state; higher is better.
            measure: how the score was measured. Scores of different measures are not compared.

        Raises:
            ValueError: this step or a later step exists, or a value cannot be stored.
            CheckpointError: writing failed, now or in the previous save.
        """
        self.wait()
        latest = max(self.steps(), default=-1)
        if step <= latest:
            raise ValueError(
                f"step {step} cannot be saved in {self.folder}, which already contains step {latest}: resume from step {latest}, or move "
                "the later checkpoints away"
            )
        arrays = manifest.flattened(state)
        packed, layout = manifest.pack_arrays(carry)
        meta = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "progress": manifest.checked_json(progress),
            "state": {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in arrays.items()},
            "carry": layout,
            "score": score,
            "measure": measure,
        }
        items: dict[str, Any] = {"state": ocp.args.PyTreeSave(arrays), "meta": ocp.args.JsonSave(meta)}
        if packed.size:
            items["carry"] = ocp.args.StandardSave({"bytes": packed})
        self._sealing.step = step
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                manifest.remove_unfinished(self.folder)
            self._manager.reload()  # updates Orbax's list, because steps may have been added or set aside
            if score is not None:
                self._scores[step] = measure, score
            # Without `force`, Orbax silently skips a step that it considers unnecessary.
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        """Waits until the save in progress is complete. Raises CheckpointError if the save failed. The message names the step and the folder. Earlier
        checkpoints are intact."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error

    def failure(self) -> str:
        """Returns the error message if the last save failed, but only on the first call. Otherwise, and during a save, returns an empty string at once."""
        if not self._manager.is_saving_in_progress():
            try:
                self.wait()
            except CheckpointError as error:
                return str(error)
        return ""

    def steps(self) -> list[int]:
        """Returns the completely written steps in order, including damaged steps. Does not wait for the save in progress."""
        return sorted(int(path.name) for path in manifest.step_folders(self.folder))

    def latest_step(self) -> int | None:
        """Waits for the save in progress and returns the step of the last complete checkpoint, or None."""
        self.wait()
        return max(self.steps(), default=None)

    def restore(
        self,
        target_state: PyTree,
        step: int | None = None,
        *,
        rows: int | None = None,
        check: Check = lambda where, progress: None,
        part: bool = False,
    ) -> Restored:
        """Restores a checkpoint with the target's structure, shardings and dtypes.

        File names, sizes and the metadata are checked first, so another run's checkpoint or different shapes are detected quickly. Then the
        processes check the sha256 of all files; each process checks a share of them.

        Args:
            target_state: a pytree of JAX arrays or `jax.ShapeDtypeStruct`s. A tree of structs costs no memory. Leaves without a
                sharding are restored to the default device. Leaves are cast if the target has a different dtype.
            step: the step to restore. If None, the latest step is restored.
            rows: number of vocabulary entries. The number of padding rows after them may differ between checkpoint and
                target. If None, the numbers of rows must be equal.
            check: called with the checkpoint's progress.
            part: whether the target may lack arrays of the checkpoint, which are then not read.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: the target's parameters or shapes differ from the checkpoint's. No arrays have been read.
            DamagedError: a file has changed since it was written. Raised in every process.
            CheckpointError: another version of dapo_jax wrote the checkpoint, or memory, permissions or the disk prevented reading it.
        """
        self.wait()
        steps = self.steps()
        if not steps or step not in (None, *steps):
            wanted = "" if step is None else f" of step {step}"
            raise FileNotFoundError(f"there is no checkpoint{wanted} in {self.folder}, only steps {steps}")
        step = steps[-1] if step is None else step
        folder, default = self.folder / str(step), SingleDeviceSharding(jax.local_devices()[0])
        target = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default)
            for path, leaf in manifest.flattened(target_state).items()
        }
        with _agreed_errors():
            files = manifest.sealed_files(folder)
            meta = self._meta(step)
            check(f"checkpoint {folder}", meta["progress"])
            saved = {path: entry for path, entry in meta["state"].items() if path in target or not part}
            manifest.check_shapes(f"checkpoint {folder}", saved, target, rows)
            manifest.check_digests(folder, files, share=(jax.process_index(), jax.process_count()))
        # `strict=False` lets Orbax truncate embeddings or pad them with zeros, within the limits of `check_shapes`.
        arguments = ocp.checkpoint_utils.construct_restore_args(target, strict=False)
        state = ocp.args.PyTreeRestore(target, restore_args=arguments, partial_restore=True)
        items: dict[str, Any] = {"state": state}
        if carry_bytes := sum(entry["bytes"] for entry in meta["carry"].values()):
            items["carry"] = ocp.args.StandardRestore({"bytes": np.empty(carry_bytes, np.uint8)})
        with _agreed_errors():
            try:
                items_read: Any = self._manager.restore(step, args=ocp.args.Composite(**items))
            except Exception as error:
                raise unreadable(folder, error) from error
        packed = np.asarray(items_read["carry"]["bytes"]) if carry_bytes else np.empty(0, np.uint8)
        # Orbax returns the leaves of a flat dict in sorted order, so they are picked in the target's order.
        leaves = [items_read["state"][path] for path in target]
        return Restored(
            step=step,
            state=jax.tree.unflatten(jax.tree.structure(target_state), leaves),
            progress=meta["progress"],
            carry=manifest.unpack_arrays(packed, meta["carry"]),
        )

    def restore_last(
        self, restore: Callable[[int], _Read], *, say: Callable[[str], None], aside: bool = False
    ) -> _Read | None:
        """Returns the result of `restore` for the last intact checkpoint, or None if there are no checkpoints.

        `restore` restores the checkpoint of a given step with `Checkpointer.restore`. `say` is called with a message for each damaged checkpoint. With `aside`, damaged
        checkpoints are renamed to STEP.damaged, so that the run can save these steps again.

        Raises:
            DamagedError: all checkpoints are damaged. They are left unchanged.
            CheckpointError: a checkpoint cannot be read but may be intact. All checkpoints are left unchanged.
            ValueError: raised by `restore`, for example for another run's checkpoint, which is not skipped.
        """
        self.wait()
        steps: list[int] = json.loads(broadcast_from_first(json.dumps(self.steps()).encode()))
        damaged: dict[int, str] = {}
        for step in reversed(steps):
            try:
                restored = restore(step)
            except DamagedError as error:
                damaged[step] = str(error)
                continue
            for skipped, problem in damaged.items():
                if aside:
                    folder = self.folder / str(skipped)
                    moved = by_first(lambda folder=folder: manifest.set_aside(folder).encode()).decode()
                    problem += f"; it is now {moved}"
                say(f"{problem}. Using step {step} instead")
            return restored
        if damaged:
            raise DamagedError(
                f"none of the checkpoints in {self.folder} can be restored: {'; '.join(damaged.values())}. Copy a checkpoint from a "
                "backup, or remove that folder to start over"
            )
        return None

    def best(self, measure: str | None = None) -> tuple[int, float] | None:
        """Returns (step, score) of the checkpoint with the highest score, preferring later steps, or None if there are no scores. Only scores of `measure` count,
        by default the measure of the last score."""
        self.wait()  # during a save, processes could see different steps
        return self._best(measure)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax calls this method. Returns, for each checkpoint, whether to keep it."""
        # `Any` is used because Orbax's protocols cannot be checked at run time.
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self._best() if self._keep_best else None
        preserved = {*sorted(steps)[-self._keep :], *(best or ())[:1]}
        return [step in preserved for step in steps]

    def close(self) -> None:
        """Waits for the save in progress and stops Orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _meta(self, step: int) -> dict[str, Any]:
        """Reads the `meta` item, which `save` writes."""
        folder = self.folder / str(step)
        manifest.check_digests(folder, {manifest.META: manifest.sealed_files(folder)[manifest.META]})
        try:
            meta = read_object(file_bytes(folder / manifest.META), manifest.META)
        except (OSError, ValueError) as error:
            raise unreadable(folder, error) from error
        if (version := meta["schema_version"]) != SCHEMA_VERSION:
            raise CheckpointError(
                f"checkpoint {folder} has schema_version {version}, but this version of dapo_jax can only read {SCHEMA_VERSION}: install "
                "the version that wrote it"
            )
        if meta["step"] != step:
            raise DamagedError(f"checkpoint {folder} contains step {meta['step']}, so its folder was renamed")
        return meta

    @functools.cached_property
    def _scores(self) -> dict[int, tuple[str, float]]:
        """The measures and scores by step, including steps that earlier processes saved. Steps without a score are omitted."""
        scores: dict[int, tuple[str, float]] = {}
        for step in self.steps():
            with suppress(CheckpointError):
                if (score := (meta := self._meta(step))["score"]) is not None:
                    scores[step] = meta.get("measure", ""), score
        return scores

    def _best(self, measure: str | None = None) -> tuple[int, float] | None:
        scored = {step: self._scores[step] for step in self.steps() if step in self._scores}
        if measure is None and scored:
            measure, _ = scored[max(scored)]
        # Scores of earlier versions have no measure. They are compared with all scores.
        comparable = [(score, step) for step, (name, score) in scored.items() if name in ("", measure)]
        return max(comparable)[::-1] if comparable else None

    def _failure(self, error: Exception) -> CheckpointError:
        """Removes the files of a failed save, and returns the error to raise."""
        if self.folder.exists():
            if jax.process_index() == 0:
                with suppress(OSError):  # the next save tries again to remove them
                    manifest.remove_unfinished(self.folder)
            self._manager.reload()  # Orbax's list lacks the oldest step, which is still on the disk
        full = os.strerror(errno.ENOSPC)
        why = f"the disk is full ({full})" if full in str(error) else str(error)
        return CheckpointError(f"saving checkpoint step {self._sealing.step} in {self.folder} failed: {why}")


@contextmanager
def _agreed_errors() -> Iterator[None]:
    """Lets all processes fail together. If the block raises an error of `_AGREED` in any process, every process raises the first such error."""
    mine = None
    try:
        yield
    except _AGREED as error:
        mine = error
    kind = next((index for index, error in enumerate(_AGREED) if isinstance(mine, error)), 0)
    for gathered in all_gather_bytes(b"" if mine is None else json.dumps([kind, str(mine)]).encode()):
        if gathered:
            kind, message = json.loads(gathered)
            raise _AGREED[kind](message) from mine


@functools.cache
def quiet_orbax() -> None:
    """Hides Orbax's log messages, because its errors contain the same text, and the messages of asyncio and TensorStore about writes of a failed save."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_from_orbax)
    shown = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # TensorStore's errors are recognised by the missing object, because they are raised in C code.
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    sys.unraisablehook = hook


def _not_from_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    files = [record.pathname, *(frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))]
    return not any("/orbax/" in file for file in files)
