"""What a checkpoint adds to orbax: a sha256 manifest of its files, and host arrays packed into bytes.

Orbax hands back flipped bits without a word (its format has no checksum over a chunk), so a manifest is
written with each step and compared before anything is restored.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from etils import epath
from jaxtyping import PyTree, UInt8

from dapo_jax.storage import entries, files_below, in_bucket, move_folder

MANIFEST = "sha256.json"

_UNFINISHED = ".orbax-checkpoint-tmp"
"""What orbax appends to the name of a step that is being written."""

_COMMITTED = "commit_success.txt"
"""What orbax writes last into a step in a bucket, where nothing can be renamed."""

_UNSEALED = {MANIFEST, "_CHECKPOINT_METADATA", _COMMITTED}
"""Written or changed by orbax after the manifest; none of them holds a value that is restored."""

_READ_BYTES = 1 << 24


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written."""


def set_aside(folder: epath.Path) -> str:
    """Gives a damaged checkpoint a name by which it is none, and returns where it is now."""
    others = {path.name for path in entries(folder.parent)}
    names = (f"{folder.name}.damaged{number}" for number in ("", *range(2, len(others) + 3)))
    place = folder.with_name(next(name for name in names if name not in others))
    move_folder(folder, place)
    return str(place)


def remove_unfinished(folder: epath.Path) -> None:
    """Removes the steps in `folder` that a killed run was writing: they are never whole, and never read."""
    for path in map(epath.Path, entries(folder)):
        named = in_bucket(path) and path.name.isdigit()
        if _UNFINISHED in path.name or (named and not (path / _COMMITTED).exists()):
            path.rmtree()


def seal(folder: epath.Path, step: int | None) -> None:
    """Writes the manifest of the step in `folder` that is complete but for its final name, or its marker file."""
    unfinished = folder / f"{step}{_UNFINISHED}"
    write_manifest(unfinished if unfinished.exists() else folder / str(step))


def write_manifest(folder: epath.Path) -> None:
    """Writes the sha256 of every file under `folder` into `folder/sha256.json`."""
    digests = _digests(folder, _files(folder))
    (folder / MANIFEST).write_text(json.dumps({"files": digests}, indent=1))


def check_manifest(folder: epath.Path, *, share: tuple[int, int] = (0, 1)) -> None:
    """Compares every file under `folder` with the manifest.

    Args:
        folder: a complete checkpoint.
        share: (index, count): read only every count-th file, so that processes divide the work.

    Raises:
        DamagedError: a file is changed, missing or surplus, or there is no manifest.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise DamagedError(
            f"checkpoint {folder} has no {MANIFEST}: it is damaged, or dapo_jax did not write it"
        )
    try:
        expected = dict[str, str](json.loads(manifest.read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{manifest} cannot be read ({error}): the checkpoint is damaged") from error
    names = _files(folder)
    if difference := sorted(set(names) ^ expected.keys()):
        state = "missing" if difference[0] in expected else "not of this checkpoint"
        raise DamagedError(f"checkpoint {folder} is damaged: {difference[0]} is {state}")
    index, count = share
    for name, digest in _digests(folder, names[index::count]).items():
        if digest != expected[name]:
            raise DamagedError(
                f"checkpoint {folder} is damaged: {name} has sha256 {digest[:12]}..., written with "
                f"{expected[name][:12]}..."
            )


def check_shapes(
    where: str,
    saved: Mapping[str, Sequence[Any]],
    target: Mapping[str, jax.ShapeDtypeStruct],
    rows: int | None,
) -> None:
    """Compares what a checkpoint holds (path -> shape, dtype) with what is to be restored.

    Args:
        where: the checkpoint, for messages.
        saved: from its metadata.
        target: by the same paths.
        rows: of embedding and unembedding that must agree; those beyond may be missing on either side. None: all.

    Raises:
        ValueError: they are not of one model.
    """
    if missing := sorted(target.keys() - saved.keys()):
        raise ValueError(f"{where} does not hold {_some(missing)}, which the target has")
    if surplus := sorted(saved.keys() - target.keys()):
        raise ValueError(f"{where} holds {_some(surplus)}, which the target does not have")
    for path, struct in target.items():
        shape = tuple(saved[path][0])
        table = path.endswith((".embedding", ".lm_head")) and shape[1:] == struct.shape[1:]
        filled_up = rows is not None and table and min(shape[0], struct.shape[0]) >= rows
        if shape != struct.shape and not filled_up:
            raise ValueError(
                f"{where} holds {path} of shape {shape}; the target's has shape {struct.shape}: "
                "was it saved with another model configuration?"
            )


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def pack_arrays(
    arrays: Mapping[str, np.ndarray],
) -> tuple[UInt8[np.ndarray, " bytes"], dict[str, dict[str, Any]]]:
    """Copies arrays into one string of bytes, in order, with a JSON-able layout to unpack them by.

    Bytes rather than arrays, because jax would narrow float64 and int64 on the way, and because a restore must
    know shapes beforehand, which here come with the layout.

    Raises:
        ValueError: an array holds Python objects or has named fields.
    """
    layout: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        if array.dtype.hasobject or array.dtype.names:
            raise ValueError(
                f"carry[{name!r}] has dtype {array.dtype}: only numbers, bools and fixed-length text"
            )
        # `.str` spells byte order out; extension types such as bfloat16 are known by name only.
        code = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        layout[name] = {"shape": list(array.shape), "dtype": code, "bytes": array.nbytes}
    packed = b"".join(array.tobytes() for array in arrays.values())
    return np.frombuffer(packed, np.uint8), layout


def unpack_arrays(
    packed: UInt8[np.ndarray, " bytes"], layout: Mapping[str, Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """The inverse of `pack_arrays`: fresh, writable arrays."""
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for name, entry in layout.items():
        stop = start + entry["bytes"]
        # Through bytes: frombuffer then sees memory of its own, whatever the alignment of `start`.
        flat = np.frombuffer(packed[start:stop].tobytes(), np.dtype(entry["dtype"]))
        arrays[name] = flat.reshape(entry["shape"]).copy()
        start = stop
    return arrays


def flattened(tree: PyTree) -> dict[str, jax.Array | jax.ShapeDtypeStruct]:
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


def struct_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def checked_json(progress: Mapping[str, Any]) -> dict[str, Any]:
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


def _files(folder: epath.Path) -> list[str]:
    """Every sealed file's path below `folder`, sorted."""
    sealed = [path for path in files_below(folder) if path.name not in _UNSEALED]
    return sorted(path.relative_to(folder).as_posix() for path in sealed)


def _digests(folder: epath.Path, names: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing and reading both release the interpreter lock
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
