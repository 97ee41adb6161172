"""Checkpoints: asynchronous, atomic, verified, and restored onto whatever mesh the target stands on.

A checkpoint stands at a step boundary and holds three things: `state` (a pytree of jax arrays), `progress`
(a small JSON dict) and `carry` (host arrays whose shapes vary from step to step). The state is stored as a flat
dict of path -> array, so what is on disk depends neither on flax's nor on optax's container classes.

Layout: FOLDER/STEP/{state,carry,meta,sha256.json}. A step is written beside its final name and renamed when it
is complete, its sha256 manifest included: a folder that bears a step's number is a whole checkpoint. In a bucket nothing
can be renamed: there it is whole once it holds commit_success.txt.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from dapo_jax.checkpoints.manifest import (
    MAX_NOTE_BYTES,
    META,
    CheckpointError,
    DamagedError,
    Meta,
    SealedFile,
    check_digests,
    check_notes,
    check_room,
    check_shapes,
    check_unpacked,
    checked_json,
    flattened,
    is_step,
    pack_arrays,
    read_meta,
    remove_unfinished,
    sealed_files,
    set_aside,
    step_folders,
    struct_of,
    unpack_arrays,
    unreadable,
)
from dapo_jax.checkpoints.retention import Keeping, quiet_orbax
from dapo_jax.checkpoints.sealing import Sealing
from dapo_jax.config import ConfigError
from dapo_jax.parallel.gather import all_gather_bytes, by_first
from dapo_jax.storage import in_bucket, path_of

SCHEMA_VERSION = 1
"""Version of the layout above and of the `meta` item; raised when an older reader could not read it."""

Check = Callable[[str, Mapping[str, Any]], None]
"""Looks at (the checkpoint's name for messages, its progress); raises DamagedError, or ConfigError where it is another run's."""

_AGREED = (DamagedError, CheckpointError, ConfigError, ValueError)
"""Errors about a checkpoint that all processes raise once one has found them; the more particular ones first."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The content of one checkpoint."""

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

    Raises:
        DamagedError: a step holds something in which orbax would read without end.
        CheckpointError: `folder` cannot be listed, or is a link to nothing.
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 3, keep_best: bool = False) -> None:
        if keep < 1:
            raise ValueError(
                f"keep must be at least 1, got {keep}: without a checkpoint no run can be resumed"
            )
        quiet_orbax()
        self.folder = _absolute(folder)
        self._saving: int | None = None
        self._sealing = Sealing(self.folder)
        self._cleaned = False
        self._scores: dict[int, float] | None = None
        check_notes(self.folder)
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=Keeping(keep, self._best_step if keep_best else lambda: None),
                create=False,
                async_options=self._sealing.options(),
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
            step: the step that was finished last, an int; must be above every step already saved.
            state: a pytree of jax arrays, none of size 0.
            progress: what JSON can hold, with finite numbers only.
            carry: host arrays of any shape and any dtype but object; may be empty.
            score: how good the state is, if that was measured; a finite number.

        Raises:
            ValueError: the step is no int, exists or a later one does, or something cannot be stored or is too much.
            CheckpointError: writing failed, now or in the save before this one.
        """
        self.wait()
        if type(step) is not int:  # a folder of another name is no checkpoint
            raise ValueError(f"step must be an int, got {step!r} of type {type(step).__name__}")
        self._check_new(step)
        arrays = flattened(state)
        packed, layout = pack_arrays(carry)
        meta = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "progress": checked_json(progress),
            "state": {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in arrays.items()},
            "carry": layout,
            **checked_json({} if score is None else {"score": score}),
        }
        if (size := len(json.dumps(meta))) > MAX_NOTE_BYTES:
            raise ValueError(
                f"progress and the names of the state's arrays take {size:,} bytes as JSON; at most {MAX_NOTE_BYTES:,} are "
                "read again: keep less in progress"
            )
        items = {"state": ocp.args.StandardSave(arrays), "meta": ocp.args.JsonSave(meta)}
        if packed.size:
            items["carry"] = ocp.args.StandardSave({"bytes": packed})
        try:
            self._make_folder()
            self._manager.reload()  # steps may have come, or been set aside, since orbax has last looked
            if score is not None:
                self._known_scores()[step] = score
            self._saving = step
            self._sealing.begin(step)
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

    def failure(self) -> str:
        """Why the last save has failed; empty while it goes on, and when it is complete. Said once; waits for nothing."""
        if not self._manager.is_saving_in_progress():
            try:
                self.wait()
            except CheckpointError as error:
                return str(error)
        return ""

    def steps(self) -> list[int]:
        """The steps that are complete, whole or damaged, in order; waits for nothing."""
        return sorted(int(path.name) for path in step_folders(self.folder))

    def latest_step(self) -> int | None:
        """The last complete checkpoint's step, or None; waits for the save in progress."""
        self.wait()
        return max(self.steps(), default=None)

    def restore(
        self,
        target_state: PyTree,
        step: int | None = None,
        *,
        rows: int | None = None,
        check: Check = lambda where, progress: None,
    ) -> Restored:
        """Reads a checkpoint; the state takes the target's structure, shardings and dtypes.

        What is small is looked at first: a file of another size, another run's checkpoint and other shapes are found before
        anything large is read.

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
            CheckpointError: the checkpoint is of a newer version; or memory, rights or a disk are in the way, and it may be whole.
        """
        self.wait()
        step = self._existing(step)
        target = {path: struct_of(leaf) for path, leaf in flattened(target_state).items()}
        with _agreed_errors():
            meta = self._checked(step, target, rows, check)

        with _agreed_errors():
            found = self._read(step, target, carry_bytes=meta.carry_bytes)
        packed = np.asarray(found["carry"]["bytes"]) if meta.carry_bytes else np.empty(0, np.uint8)
        return Restored(
            step=step,
            # A flat dict's leaves come back in sorted order; the target's own order is needed.
            state=jax.tree.unflatten(
                jax.tree.structure(target_state), [found["state"][path] for path in target]
            ),
            progress=meta.progress,
            carry=unpack_arrays(packed, meta.carry),
        )

    def set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint so that its step can be saved again, and returns where it is now."""
        return by_first(lambda: set_aside(self.folder / str(step)).encode()).decode()

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
        if step is not None and is_step(self.folder / str(step)):
            return step
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(f"there is no checkpoint in {self.folder}")
        if step is not None:
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.folder}; it has steps {steps}"
            )
        return steps[-1]

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

    def _checked(
        self, step: int, target: Mapping[str, jax.ShapeDtypeStruct], rows: int | None, check: Check
    ) -> Meta:
        """The checkpoint's description of itself, once it is found to be whole and to fit; each process reads its share of the files."""
        folder = self.folder / str(step)
        files = sealed_files(folder)
        check_digests(folder, {name: file for name, file in files.items() if name == META})
        meta = read_meta(folder, newest=SCHEMA_VERSION)
        check(f"checkpoint {folder}", meta.progress)
        check_shapes(f"checkpoint {folder}", meta.state, target, rows)
        check_room(folder, files, target.values())
        check_digests(folder, files, share=(jax.process_index(), jax.process_count()))
        _check_stored(folder, meta, files)
        return meta

    def _read(self, step: int, target: Mapping[str, jax.ShapeDtypeStruct], *, carry_bytes: int) -> Any:
        # Not strict: filled up with zeros or cut; `check_shapes` saw to it that nothing else is.
        items = {"state": ocp.args.StandardRestore(target, strict=False)}
        try:
            if carry_bytes:
                items["carry"] = ocp.args.StandardRestore({"bytes": np.empty(carry_bytes, np.uint8)})
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise unreadable(self.folder / str(step), error) from error

    def _known_scores(self) -> dict[int, float]:
        """Score of each step that has one, those of earlier runs of the program included."""
        if self._scores is None:
            self._scores = {}
            for step in self.steps():
                with suppress(CheckpointError):
                    score = read_meta(self.folder / str(step), newest=SCHEMA_VERSION).score
                    self._scores |= {} if score is None else {step: score}
        return self._scores

    def _best_step(self) -> int | None:
        best = self._best()
        return best and best[0]

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._cleaned and jax.process_index() == 0:
            remove_unfinished(self.folder)
        self._cleaned = True

    def _failure(self, step: int | None, error: Exception) -> CheckpointError:
        """The error to raise for a save that has failed; the files that it has written are removed."""
        if self.folder.exists():
            if jax.process_index() == 0:
                with suppress(OSError):  # the next save tries it again
                    remove_unfinished(self.folder)
            self._cleaned = False
            self._manager.reload()  # orbax has already struck the oldest step off its list; it is still on disk
        # What the libraries below say of a full disk names files of theirs, twice over.
        full = os.strerror(errno.ENOSPC)
        why = f"the disk is full ({full})" if full in str(error) else str(error)
        return CheckpointError(f"saving checkpoint step {step} in {self.folder} failed: {why}")


@contextmanager
def _agreed_errors() -> Iterator[None]:
    """Raises what one process finds wrong, the first that does, in all of them."""
    mine = None
    try:
        yield
    except _AGREED as error:
        mine = error
    kind = next((place for place, each in enumerate(_AGREED) if isinstance(mine, each)), 0)
    for found in all_gather_bytes(b"" if mine is None else json.dumps([kind, str(mine)]).encode()):
        if found:
            kind, message = json.loads(found)
            raise _AGREED[kind](message) from mine


def _check_stored(folder: epath.Path, meta: Meta, files: Mapping[str, SealedFile]) -> None:
    """Compares the arrays that orbax would read with those that the checkpoint speaks of: it would cut them, or fill them up."""
    where = f"checkpoint {folder}"
    try:
        arrays = {f"state/{path}": array for path, array in _stored_in(folder / "state").items()}
        if meta.carry_bytes:
            arrays["carry"] = _stored_in(folder / "carry")["bytes"]
        found = {name: (tuple(array.shape), str(np.dtype(array.dtype))) for name, array in arrays.items()}
        chunks = {name: array.storage.chunk_shape for name, array in arrays.items()}
    except Exception as error:
        raise unreadable(folder, error) from error
    said = {f"state/{path}": (tuple(shape), dtype) for path, (shape, dtype) in meta.state.items()}
    if meta.carry_bytes:
        said["carry"] = ((meta.carry_bytes,), "uint8")
        check_unpacked(where, meta.carry_bytes, files)
    for name in sorted(said.keys() | found.keys()):
        if said.get(name) != found.get(name):
            raise DamagedError(
                f"{where} is damaged: shape and dtype of {name} are {found.get(name)}, written as {said.get(name)}"
            )
        if math.prod(chunks[name]) > math.prod(found[name][0]):
            raise DamagedError(f"{where} is damaged: {name} is in pieces that are larger than itself")


def _stored_in(item: epath.Path) -> dict[str, Any]:
    """The metadata that orbax has of an item's arrays, by name."""
    handler = ocp.StandardCheckpointHandler()
    try:
        return dict(handler.metadata(item).tree)
    finally:
        handler.close()


def _absolute(folder: str | PathLike[str]) -> epath.Path:
    path = epath.Path(path_of(folder))
    return path if in_bucket(path) else path.resolve()  # resolve takes gs:// for a relative name
