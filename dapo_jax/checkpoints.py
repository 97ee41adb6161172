"""Checkpoints: asynchronous, atomic, verified, and restored onto whatever mesh the target stands on.

A checkpoint stands at a step boundary and holds three things: `state` (a pytree of jax arrays), `progress`
(a small JSON dict) and `carry` (host arrays whose shapes vary from step to step). The state is stored as a flat
dict of path -> array, so what is on disk depends neither on flax's nor on optax's container classes.

Layout: FOLDER/STEP/{state,carry,meta,sha256.json}. A step is written beside its final name and renamed when it
is complete, its sha256 manifest included: a folder that bears a step's number is a whole checkpoint. In a bucket nothing
can be renamed: there it is whole once it holds commit_success.txt.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from dapo_jax.checkpoint_files import (
    CheckpointError,
    DamagedError,
    check_manifest,
    check_shapes,
    checked_json,
    flattened,
    pack_arrays,
    remove_unfinished,
    seal,
    set_aside,
    struct_of,
    unpack_arrays,
)
from dapo_jax.checkpoint_keeping import Keeping, quiet_orbax
from dapo_jax.parallel.exchange import agreed, exchange
from dapo_jax.storage import in_bucket, path_of

SCHEMA_VERSION = 1
"""Version of the layout above and of the `meta` item; raised when an older reader could not read it."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What one checkpoint held."""

    step: int
    state: PyTree
    """In the structure, dtypes and shardings of the target."""
    progress: dict[str, Any]
    carry: dict[str, np.ndarray]


class Checkpointer:
    """Writes and reads the checkpoints of one run. Every process of a run makes the same calls.

    Nothing is created on disk before the first `save`, so the folder of another run, even of a live one, may
    be opened to restore from it. Use it as a context manager: leaving waits for the save in progress.

    Args:
        folder: where the steps lie; local or in a bucket (`dapo_jax.storage`).
        keep: how many of the last checkpoints stay. At least 1.
        keep_best: that with the highest score stays too, of equal ones the last.
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 3, keep_best: bool = False) -> None:
        if keep < 1:
            raise ValueError(
                f"keep must be at least 1, got {keep}: without a checkpoint no run can be resumed"
            )
        quiet_orbax()
        self.folder = _absolute(folder)
        self._saving: int | None = None
        self._cleaned = False
        self._scores: dict[int, float] | None = None
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=Keeping(keep, self._best_step if keep_best else lambda: None),
                create=False,
                # Runs on the primary process, after the last byte of the step and before it takes its final name.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            ),
        )

    def save(
        self,
        step: int,
        state: PyTree,
        progress: Mapping[str, Any],
        carry: Mapping[str, np.ndarray],
        *,
        score: float | None = None,
    ) -> None:
        """Starts saving `step`; the files are written in the background.

        The caller may donate or overwrite `state` and `carry` as soon as this returns: they have been copied,
        or, on CPU, are held so that a donation copies instead of overwriting.

        Args:
            step: the step that was finished last; must be above every step already saved.
            state: a pytree of jax arrays, none of size 0.
            progress: what JSON can hold, with finite numbers only.
            carry: host arrays of any shape and any dtype but object; may be empty.
            score: how good the state is, if that was measured; a finite number.

        Raises:
            ValueError: the step exists, a later one does, or something cannot be stored.
            CheckpointError: writing failed, now or in the save before this one.
        """
        self.wait()
        self._check_new(step)
        arrays = flattened(state)
        packed, layout = pack_arrays(carry)
        meta = {
            "schema_version": SCHEMA_VERSION,
            "progress": checked_json(progress),
            "state": {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in arrays.items()},
            "carry": layout,
            **checked_json({} if score is None else {"score": score}),
        }
        items = {"state": ocp.args.StandardSave(arrays), "meta": ocp.args.JsonSave(meta)}
        if packed.size:
            items["carry"] = ocp.args.StandardSave({"bytes": packed})
        try:
            self._make_folder()
            if score is not None:
                self._known_scores()[step] = score
            self._saving = step
            # force: orbax would otherwise skip a step without a word when it thinks it need not be saved.
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            raise self._failure(step, error) from error

    def wait(self) -> None:
        """Returns when the save in progress is complete on disk.

        Raises:
            CheckpointError: it failed; the message names the step and the folder. Earlier checkpoints are intact.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(self._saving, error) from error

    def steps(self) -> list[int]:
        """Those that are complete, whole or damaged, in order; waits for nothing."""
        return sorted(self._manager.all_steps(read=True)) if self.folder.exists() else []

    def latest_step(self) -> int | None:
        """The last complete checkpoint's step, or None; waits for the save in progress."""
        self.wait()
        return max(self.steps(), default=None)

    def restore(self, target_state: PyTree, step: int | None = None, *, rows: int | None = None) -> Restored:
        """Reads a checkpoint; the state takes the target's structure, shardings and dtypes.

        Args:
            target_state: a pytree of jax arrays or of `jax.ShapeDtypeStruct`s (without a sharding: the default
                device). It is only looked at; a tree of structs costs no memory. A leaf of another dtype than
                the saved one is cast.
            step: which; None is the latest.
            rows: of embedding and unembedding that are entries of the vocabulary. What fills them up so that a mesh can split
                them may differ between what was saved and the target. None: it may not.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: the target has other parameters or shapes than were saved; nothing was read yet.
            DamagedError: a file differs from what was written; in every process, whichever has found it.
            CheckpointError: the checkpoint is of a newer version.
        """
        self.wait()
        step = self._existing(step)
        self._check_files(step)
        meta = self._meta(step)
        if meta["schema_version"] > SCHEMA_VERSION:
            raise CheckpointError(
                f"checkpoint {self.folder / str(step)} has schema_version {meta['schema_version']}; this version of "
                f"dapo_jax reads up to {SCHEMA_VERSION}: upgrade dapo_jax"
            )
        target = {path: struct_of(leaf) for path, leaf in flattened(target_state).items()}
        check_shapes(f"checkpoint {self.folder / str(step)}", meta["state"], target, rows)

        # Not strict: filled up with zeros or cut; `check_shapes` saw to it that nothing else is.
        items = {"state": ocp.args.StandardRestore(target, strict=False)}
        size = sum(entry["bytes"] for entry in meta["carry"].values())
        if size:
            items["carry"] = ocp.args.StandardRestore({"bytes": np.empty(size, np.uint8)})
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise DamagedError(f"checkpoint {self.folder / str(step)} cannot be read: {error}") from error
        packed = np.asarray(found["carry"]["bytes"]) if size else np.empty(0, np.uint8)
        return Restored(
            step=step,
            # A flat dict's leaves come back in sorted order; the target's own order is needed.
            state=jax.tree.unflatten(
                jax.tree.structure(target_state), [found["state"][path] for path in target]
            ),
            progress=meta["progress"],
            carry=unpack_arrays(packed, meta["carry"]),
        )

    def set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint so that its step can be saved again, and returns where it is now."""
        place = set_aside(self.folder / str(step)) if jax.process_index() == 0 else ""
        place = agreed(place.encode()).decode()
        self._manager.reload()
        return place

    def best(self) -> tuple[int, float] | None:
        """(step, score) of the best checkpoint, the last of equal ones; None if none has a score."""
        self.wait()  # for what one process might see already, and another not yet
        return self._best()

    def _best(self) -> tuple[int, float] | None:
        steps = self.steps()
        scored = [(score, step) for step, score in self._known_scores().items() if step in steps]
        return max(scored)[::-1] if scored else None

    def close(self) -> None:
        """Waits for the save in progress and lets go of orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(f"there is no checkpoint in {self.folder}")
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.folder}; it has steps {steps}"
            )
        return steps[-1] if step is None else step

    def _check_new(self, step: int) -> None:
        latest = max(self.steps(), default=-1)
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        if step == latest:
            raise ValueError(f"step {step} is already saved in {self.folder}")
        if step < latest:
            raise ValueError(
                f"step {step} comes before step {latest}, already saved in {self.folder}: resume from step {latest}, "
                "or move the later checkpoints away"
            )

    def _check_files(self, step: int) -> None:
        """Raises the first process's DamagedError that has one, in all of them: each reads its share."""
        problem = ""
        try:
            check_manifest(self.folder / str(step), share=(jax.process_index(), jax.process_count()))
        except DamagedError as error:
            problem = str(error)
        for found in exchange(problem.encode()):
            if found:
                raise DamagedError(found.decode())

    def _meta(self, step: int) -> dict[str, Any]:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        except Exception as error:
            raise DamagedError(f"checkpoint {self.folder / str(step)} cannot be read: {error}") from error

    def _known_scores(self) -> dict[int, float]:
        """Score of each step that has one, those of earlier runs of the program included."""
        if self._scores is None:
            self._scores = {}
            for step in self.steps():
                with suppress(DamagedError, KeyError):
                    self._scores[step] = self._meta(step)["score"]
        return self._scores

    def _best_step(self) -> int | None:
        best = self._best()
        return best and best[0]

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._cleaned and jax.process_index() == 0:
            remove_unfinished(self.folder)
        self._cleaned = True

    def _seal(self) -> None:
        """Adds the sha256 manifest to the step that is about to take its final name."""
        seal(self.folder, self._saving)

    def _failure(self, step: int | None, error: Exception) -> CheckpointError:
        if self.folder.exists():
            self._manager.reload()  # orbax has already struck the oldest step off its list; it is still on disk
        return CheckpointError(f"saving checkpoint step {step} in {self.folder} failed: {error}")


def _absolute(folder: str | PathLike[str]) -> epath.Path:
    path = epath.Path(path_of(folder))
    return path if in_bucket(path) else path.resolve()  # resolve takes gs:// for a relative name
