"""Checkpoints: asynchronous, atomic, verified, and restored onto whatever mesh the target stands on.

A checkpoint stands at a step boundary and holds three things: `state` (a pytree of jax arrays), `progress`
(a small JSON dict) and `carry` (host arrays whose shapes vary from step to step). The state is stored as a flat
dict of path -> array, so what is on disk depends neither on flax's nor on optax's container classes.

Layout: FOLDER/STEP/{state,carry,meta,sha256.json}. A step is written beside its final name and renamed when it
is complete, its sha256 manifest included: a folder that bears a step's number is a whole checkpoint. In a bucket nothing
can be renamed: there it is whole once it holds commit_success.txt.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from dapo_jax.checkpoint_files import check_manifest, pack_arrays, remove_unfinished, seal, unpack_arrays
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
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(
                f"keep must be at least 1, got {keep}: without a checkpoint no run can be resumed"
            )
        _quiet_orbax()
        self.folder = _absolute(folder)
        self._saving: int | None = None
        self._cleaned = False
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=False,
                # Runs on the primary process, after the last byte of the step and before it takes its final name.
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            ),
        )

    def save(
        self, step: int, state: PyTree, progress: Mapping[str, Any], carry: Mapping[str, np.ndarray]
    ) -> None:
        """Starts saving `step`; the files are written in the background.

        The caller may donate or overwrite `state` and `carry` as soon as this returns: they have been copied,
        or, on CPU, are held so that a donation copies instead of overwriting.

        Args:
            step: the step that was finished last; must be above every step already saved.
            state: a pytree of jax arrays, none of size 0.
            progress: what JSON can hold, with finite numbers only.
            carry: host arrays of any shape and any dtype but object; may be empty.

        Raises:
            ValueError: the step exists, a later one does, or something cannot be stored.
            RuntimeError: writing failed, now or in the save before this one.
        """
        self.wait()
        self._check_new(step)
        arrays = _flatten(state)
        packed, layout = pack_arrays(carry)
        meta = {
            "schema_version": SCHEMA_VERSION,
            "progress": _checked_json(progress),
            "state": {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in arrays.items()},
            "carry": layout,
        }
        items = {"state": ocp.args.StandardSave(arrays), "meta": ocp.args.JsonSave(meta)}
        if packed.size:
            items["carry"] = ocp.args.StandardSave({"bytes": packed})
        try:
            self._make_folder()
            self._saving = step
            # force: orbax would otherwise skip a step without a word when it thinks it need not be saved.
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except Exception as error:
            raise self._failure(step, error) from error

    def wait(self) -> None:
        """Returns when the save in progress is complete on disk.

        Raises:
            RuntimeError: it failed; the message names the step and the folder. Earlier checkpoints are intact.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(self._saving, error) from error

    def latest_step(self) -> int | None:
        """The last complete checkpoint's step, or None; waits for the save in progress."""
        self.wait()
        return max(self._steps(), default=None)

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
            RuntimeError: a file differs from what was written, or the checkpoint is of a newer version.
        """
        self.wait()
        step = self._existing(step)
        check_manifest(self.folder / str(step), share=(jax.process_index(), jax.process_count()))
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        if meta["schema_version"] > SCHEMA_VERSION:
            raise RuntimeError(
                f"checkpoint {self.folder / str(step)} has schema_version {meta['schema_version']}; this version of "
                f"dapo_jax reads up to {SCHEMA_VERSION}: upgrade dapo_jax"
            )
        target = {path: _struct(leaf) for path, leaf in _flatten(target_state).items()}
        self._check_target(step, meta["state"], target, rows)

        # Not strict: filled up with zeros or cut; `_check_target` saw that nothing else is.
        items = {"state": ocp.args.StandardRestore(target, strict=False)}
        size = sum(entry["bytes"] for entry in meta["carry"].values())
        if size:
            items["carry"] = ocp.args.StandardRestore({"bytes": np.empty(size, np.uint8)})
        found = self._manager.restore(step, args=ocp.args.Composite(**items))
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

    def _steps(self) -> list[int]:
        return sorted(self._manager.all_steps(read=True)) if self.folder.exists() else []

    def _existing(self, step: int | None) -> int:
        steps = self._steps()
        if not steps:
            raise FileNotFoundError(f"there is no checkpoint in {self.folder}")
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.folder}; it has steps {steps}"
            )
        return steps[-1] if step is None else step

    def _check_new(self, step: int) -> None:
        latest = max(self._steps(), default=-1)
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        if step == latest:
            raise ValueError(f"step {step} is already saved in {self.folder}")
        if step < latest:
            raise ValueError(
                f"step {step} comes before step {latest}, already saved in {self.folder}: resume from step {latest}, "
                "or move the later checkpoints away"
            )

    def _check_target(
        self,
        step: int,
        saved: Mapping[str, Sequence[Any]],
        target: Mapping[str, jax.ShapeDtypeStruct],
        rows: int | None,
    ) -> None:
        where = f"checkpoint {self.folder / str(step)}"
        if missing := sorted(target.keys() - saved.keys()):
            raise ValueError(f"{where} does not hold {_some(missing)}, which the target has")
        if surplus := sorted(saved.keys() - target.keys()):
            raise ValueError(f"{where} holds {_some(surplus)}, which the target does not have")
        for path, struct in target.items():
            shape = tuple(saved[path][0])
            if shape != struct.shape and not _filled_up(path, shape, struct.shape, rows):
                raise ValueError(
                    f"{where} holds {path} of shape {shape}; the target's has shape {struct.shape}: "
                    "was it saved with another model configuration?"
                )

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._cleaned and jax.process_index() == 0:
            remove_unfinished(self.folder)
        self._cleaned = True

    def _seal(self) -> None:
        """Adds the sha256 manifest to the step that is about to take its final name."""
        seal(self.folder, self._saving)

    def _failure(self, step: int | None, error: Exception) -> RuntimeError:
        if self.folder.exists():
            self._manager.reload()  # orbax has already struck the oldest step off its list; it is still on disk
        return RuntimeError(f"saving checkpoint step {step} in {self.folder} failed: {error}")


def _filled_up(path: str, saved: tuple[int, ...], wanted: tuple[int, ...], rows: int | None) -> bool:
    table = path.endswith((".embedding", ".lm_head")) and saved[1:] == wanted[1:]
    return rows is not None and table and min(saved[0], wanted[0]) >= rows


def _absolute(folder: str | PathLike[str]) -> epath.Path:
    path = epath.Path(path_of(folder))
    return path if in_bucket(path) else path.resolve()  # resolve takes gs:// for a relative name


def _flatten(tree: PyTree) -> dict[str, jax.Array | jax.ShapeDtypeStruct]:
    """Leaves by readable path, in the tree's order: `params.layers.q_proj`."""
    flat: dict[str, jax.Array | jax.ShapeDtypeStruct] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
            keys = keys[:-1]  # the box flax puts around an array
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(
                f"state leaf {path} is a {type(leaf).__name__}; only jax arrays are saved and restored"
            )
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(f"state leaf {path} is of dtype {leaf.dtype}; save jax.random.key_data of a key")
        if 0 in leaf.shape:
            raise ValueError(
                f"state leaf {path} has shape {leaf.shape}: arrays without elements cannot be stored"
            )
        if path in flat:
            raise ValueError(f"two leaves of the state have the path {path}; rename one of their containers")
        flat[path] = leaf
    return flat


def _struct(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _checked_json(progress: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that reads back equal, or an error that names the entry."""
    for key, value in progress.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not (isinstance(key, str) and same):
            raise ValueError(
                f"progress[{key!r}] = {value!r} does not survive JSON: use str keys, finite Python numbers, str, "
                "bool, None, lists and dicts"
            )
    return dict(progress)


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _quiet_orbax() -> None:
    """Keeps orbax's remarks about its own defaults out of the terminal; its errors still show."""
    logger = logging.getLogger("absl")
    if _from_orbax not in logger.filters:
        logger.addFilter(_from_orbax)


def _from_orbax(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "/orbax/" not in record.pathname.replace("\\", "/")
