"""The files of a checkpoint, their manifest with each file's name, size and sha256, and the errors for damaged checkpoints.

Orbax does not check array data, so it restores flipped bits without an error. Therefore every step has a manifest, which is compared
with the files before anything is restored.

Each process writes the data of an item (state or carry) to its own folder, such as `ocdbt.process_3`, and hashes these files. The first
process hashes only the remaining small files, and writes all digests into the manifest. Digests are exchanged through the key-value store
of JAX's coordination service. Collectives cannot be used, because a save runs in parallel with training, whose collectives must keep
their order.
"""

import errno
import hashlib
import itertools
import json
import reprlib
from collections.abc import Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree, UInt8

from dapo_jax.parallel.together import coordination_service
from dapo_jax.storage import entries, file_bytes, in_bucket, move_folder, stored_files
from dapo_jax.text.plain_json import read_object

MANIFEST = "sha256.json"

META = "meta/metadata"
"""The file into which Orbax writes the `meta` item."""

_ALL_WRITTEN = "async_write_complete"
"""Part of Orbax's name for the barrier that each process reaches after writing its files."""

_UNFINISHED = ".orbax-checkpoint-tmp"
"""Suffix that Orbax appends to the name of a step while it is being written."""

_COMMITTED = "commit_success.txt"
"""The file that Orbax writes last into a step in a bucket, where objects cannot be renamed."""

_UNSEALED = {MANIFEST, "_CHECKPOINT_METADATA", _COMMITTED}
"""Files that are written after the manifest. They do not contain restored values."""

_FAILING_DISK = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


class DamagedError(CheckpointError):
    """The files of a checkpoint have changed since they were written."""


def unreadable(folder: epath.Path, error: Exception) -> CheckpointError:
    """Returns the error to raise if a checkpoint cannot be read: usually a DamagedError, after which a resuming run tries the previous checkpoint.

    If memory, permissions or the disk caused the failure, the checkpoint may be intact. The error is then a CheckpointError, which stops the run.
    """
    where = f"checkpoint {folder} cannot be read: {str(error) or type(error).__name__}"
    number = getattr(error, "errno", None)
    # XLA and TensorStore have no exception classes for these errors, so their messages are searched.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or number == errno.ENOMEM:
        remedy = "free memory on the host or device, or use a machine with more memory"
    elif isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error):
        remedy = "give this user read permission"
    elif number in _FAILING_DISK:
        remedy = "try again, and if the disk still fails, move this checkpoint away"
    else:
        return DamagedError(where)
    return CheckpointError(f"{where}. It may be intact, so it was not changed: {remedy}")


def step_folders(folder: epath.Path) -> list[epath.Path]:
    """Returns the completely written steps in `folder`, whether or not they are damaged. Raises CheckpointError if it cannot be listed."""
    try:
        return [path for path in map(epath.Path, entries(folder)) if _is_step(path)]
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be listed ({error.strerror or error}): it must be a folder that this user may read"
        ) from error


def _is_step(path: epath.Path) -> bool:
    """Returns whether `path` is a complete step: it has its final name and, in a bucket, contains the completion marker."""
    if not (path.name.isdecimal() and path.name == str(int(path.name))):
        return False
    return (path / _COMMITTED).exists() if in_bucket(path) else path.is_dir()


def set_aside(folder: epath.Path) -> str:
    """Renames a damaged checkpoint to STEP.damaged and returns its new path, or raises CheckpointError."""
    names = (f"{folder.name}.damaged{number}" for number in itertools.chain([""], itertools.count(2)))
    target = next(path for path in map(folder.with_name, names) if not path.exists())
    try:
        move_folder(folder, target)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged, and cannot be renamed to {target.name} ({error.strerror or error}): move it away, or "
            "give this user permission to rename it"
        ) from error
    return str(target)


def remove_unfinished(folder: epath.Path) -> None:
    """Removes incomplete steps in `folder`, which a killed run may have left."""
    for path in map(epath.Path, entries(folder)):
        named = in_bucket(path) and path.name.isdigit()
        if _UNFINISHED in path.name or (named and not (path / _COMMITTED).exists()):
            path.rmtree()


def being_written(path: epath.Path) -> epath.Path:
    """Returns the current path of a step, or of an item in a step. On a disk, a step has a temporary name until it is complete."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    return unfinished if unfinished.exists() else path


@dataclass(frozen=True)
class SealedFile:
    """A file's entry in the manifest."""

    bytes: int
    sha256: str
    md5: str = ""
    """The md5 digest that the bucket reports for the file, in the bucket's encoding. Empty on a disk."""


def write_manifest(folder: epath.Path, known: Mapping[str, SealedFile]) -> None:
    """Writes the entry of every file in `folder`, a step that lacks only its final name or its marker, to `folder/sha256.json`.

    `known` contains the entries of the files that the processes hashed after writing them. All other files are read. Raises
    CheckpointError if a known file is missing or has a different size.
    """
    sizes = {name: size for name, (size, _) in stored_files(folder).items() if _is_sealed(name)}
    for name, file in known.items():
        if sizes.get(name) != file.bytes:
            actual = f"{sizes[name]:,} bytes" if name in sizes else "no such file"
            raise CheckpointError(
                f"{folder / name} was written with {file.bytes:,} bytes, but the first process finds {actual}: put the "
                "checkpoints on a disk or into a bucket that all processes can access"
            )
    files = {**digested(folder, sizes.keys() - known.keys()), **known}
    content = {name: vars(files[name]) for name in sorted(files)}
    (folder / MANIFEST).write_text(json.dumps({"files": content}, indent=1))


def digested(folder: epath.Path, names: Set[str] | None = None) -> dict[str, SealedFile]:
    """Hashes the files `names` in `folder`, by default all files, and returns their manifest entries by path."""
    # The md5s are listed before the files are read. So if an object is replaced in between, its md5 mismatches, and a restore checks its sha256.
    stored = stored_files(folder)
    digests = _digests(folder, stored.keys() if names is None else names)
    return {name: SealedFile(stored[name][0], digest, stored[name][1]) for name, digest in digests.items()}


def sealed_files(folder: epath.Path) -> dict[str, SealedFile]:
    """Returns the manifest's entries by path, after checking names and sizes of the files. Only the manifest is read.

    Raises:
        DamagedError: a file is missing, unexpected or has a different size, or there is no manifest.
        CheckpointError: the manifest cannot be read (see `unreadable`).
    """
    try:
        stored = stored_files(folder)
        if MANIFEST not in stored:
            raise DamagedError(f"checkpoint {folder} has no {MANIFEST}: it is damaged, or not from dapo_jax")
        listed = read_object(file_bytes(folder / MANIFEST), MANIFEST)["files"]
        files = {name: SealedFile(**entry) for name, entry in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(folder, error) from error
    if difference := sorted(files.keys() ^ set(filter(_is_sealed, stored))):
        state = "missing" if difference[0] in files else "not part of this checkpoint"
        raise DamagedError(f"checkpoint {folder} is damaged: {difference[0]} is {state}")
    for name, file in files.items():
        if stored[name][0] != file.bytes:
            raise DamagedError(
                f"checkpoint {folder} is damaged: {name} has {stored[name][0]:,} bytes, but {file.bytes:,} were written"
            )
    return files


def _is_sealed(name: str) -> bool:
    return name.rpartition("/")[2] not in _UNSEALED


def check_digests(
    folder: epath.Path, files: Mapping[str, SealedFile], *, share: tuple[int, int] = (0, 1)
) -> None:
    """Compares files with their entries from `sealed_files`. A file is not read if the bucket still reports its recorded md5.

    With a `share` of (index, count), only every count-th file is checked, so that the work can be divided among processes. Raises
    DamagedError if a file has changed, and CheckpointError if a file cannot be read (see `unreadable`).
    """
    index, count = share
    mine = {name: files[name] for name in sorted(files)[index::count]}
    try:
        if any(file.md5 for file in mine.values()):
            stored = stored_files(folder)
            mine = {name: file for name, file in mine.items() if not file.md5 or stored[name][1] != file.md5}
        digests = _digests(folder, mine)
    except (OSError, MemoryError) as error:
        raise unreadable(folder, error) from error
    for name, digest in digests.items():
        if digest != mine[name].sha256:
            raise DamagedError(
                f"checkpoint {folder} is damaged: {name} has sha256 {digest[:12]}..., but was written with {mine[name].sha256[:12]}..."
            )


def _digests(folder: epath.Path, names: Collection[str]) -> dict[str, str]:
    def sha256(name: str) -> str:
        opened: Any = (folder / name).open("rb")
        with opened as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing and reading both release the GIL
        return dict(zip(names, pool.map(sha256, names), strict=True))


class Sealing:
    """Writes the manifest of each step that Orbax saves in a folder. Before each save, set the attribute `step`."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder, self.step = folder, -1
        self._barrier = ocp.multihost.get_barrier_sync_fn()

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """Orbax calls this method at its barriers. At the barrier after the writes, each process publishes the digests of its files."""
        if _ALL_WRITTEN in key and jax.process_count() > 1:
            entries = json.dumps({name: vars(file) for name, file in self._written_here().items()})
            store = coordination_service().client
            store.key_value_set(f"{self._key}{jax.process_index()}", entries, allow_overwrite=True)
        self._barrier(key=key, timeout_ms=timeout_ms)

    def _written_here(self) -> dict[str, SealedFile]:
        """Returns the entries of the files in this process's folders, by their path in the step."""
        step, files = being_written(self._folder / str(self.step)), {}
        for item in ("state", "carry"):
            name = f"ocdbt.process_{jax.process_index()}"
            if (folder := being_written(step / item) / name).exists():
                files |= {f"{item}/{name}/{path}": file for path, file in digested(folder).items()}
        return files

    def seal(self) -> None:
        """Writes the manifest. Orbax calls this method in the first process after the last write."""
        known: dict[str, SealedFile] = {}
        if jax.process_count() > 1:
            store = coordination_service().client
            for _, text in store.key_value_dir_get(self._key):
                known |= {name: SealedFile(**file) for name, file in json.loads(text).items()}
            store.key_value_delete(self._key)
        write_manifest(being_written(self._folder / str(self.step)), known)

    @property
    def _key(self) -> str:
        return f"dapo_jax/digests/{self._folder}/{self.step}/"


def pack_arrays(
    arrays: Mapping[str, np.ndarray],
) -> tuple[UInt8[np.ndarray, " bytes"], dict[str, dict[str, Any]]]:
    """Copies arrays into one byte array, and returns it with its layout, which can be stored as JSON.

    If the arrays were saved separately, JAX would narrow float64 and int64, and a restore would need to know their shapes. Raises ValueError if an array
    contains Python objects or has named fields.
    """
    layout: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        if array.dtype.hasobject or array.dtype.names:
            raise ValueError(
                f"carry[{name!r}] has dtype {array.dtype}, needs numbers, bools or fixed-length text"
            )
        # `.str` includes the byte order. Extension types such as bfloat16 can only be found by name.
        code = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        layout[name] = {"shape": list(array.shape), "dtype": code, "bytes": array.nbytes}
    packed = b"".join(array.tobytes() for array in arrays.values())
    return np.frombuffer(packed, np.uint8), layout


def unpack_arrays(
    packed: UInt8[np.ndarray, " bytes"], layout: Mapping[str, Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Inverse of `pack_arrays`. The arrays are writable copies."""
    pieces = np.split(packed, np.cumsum([entry["bytes"] for entry in layout.values()], dtype=int))
    # A bytearray is a writable copy, and is aligned for any dtype.
    return {
        name: np.frombuffer(bytearray(piece), np.dtype(entry["dtype"])).reshape(entry["shape"])
        for (name, entry), piece in zip(layout.items(), pieces, strict=False)
    }


def flattened(tree: PyTree) -> dict[str, jax.Array | jax.ShapeDtypeStruct]:
    """Returns a dict from readable paths, such as `params.layers.q_proj`, to the tree's leaves, in the tree's order. Raises ValueError if a leaf cannot be
    stored, or two leaves have the same path."""
    flat: dict[str, jax.Array | jax.ShapeDtypeStruct] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
            keys = keys[:-1]  # omits `.value`, an attribute of Flax's variable class
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(f"state leaf {path} is a {type(leaf).__name__}, needs a JAX array")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) or 0 in leaf.shape:
            raise ValueError(
                f"state leaf {path} of dtype {leaf.dtype} and shape {leaf.shape} cannot be stored: arrays must not be empty, and for a "
                "PRNG key, save jax.random.key_data(key)"
            )
        if path in flat:
            raise ValueError(f"two leaves of the state have the path {path}; rename one of their containers")
        flat[path] = leaf
    return flat


def check_shapes(
    where: str,
    saved: Mapping[str, Sequence[Any]],
    target: Mapping[str, jax.ShapeDtypeStruct],
    rows: int | None,
) -> None:
    """Raises ValueError if a checkpoint's arrays (path -> shape and dtype) do not have the shapes of `target` (see `Checkpointer.restore` for `rows`).

    `where` is the checkpoint's name for messages.
    """
    if missing := sorted(target.keys() - saved.keys()):
        raise ValueError(f"{where} does not contain {', '.join(missing[:3])}, which the target has")
    if surplus := sorted(saved.keys() - target.keys()):
        raise ValueError(f"{where} contains {', '.join(surplus[:3])}, which the target does not have")
    for path, struct in target.items():
        shape = tuple(saved[path][0])
        table = path.endswith((".embedding", ".lm_head")) and shape[1:] == struct.shape[1:]
        filled_up = rows is not None and table and min(shape[0], struct.shape[0]) >= rows
        if shape != struct.shape and not filled_up:
            raise ValueError(
                f"{where} contains {path} of shape {shape}, but the target has shape {struct.shape}: "
                "was it saved with another model configuration?"
            )


def checked_json(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Encodes `progress` as JSON and returns the decoded copy. Raises ValueError if the copy differs from `progress`."""
    with suppress(TypeError, ValueError):
        copy = json.loads(json.dumps(progress, allow_nan=False))
        if copy == progress:
            return copy
    raise ValueError(
        f"progress={reprlib.repr(progress)} changes when stored as JSON: use str keys, finite Python numbers, str, bool, None, lists and dicts"
    )
