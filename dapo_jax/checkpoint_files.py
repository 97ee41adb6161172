"""What a checkpoint adds to orbax: a sha256 manifest of its files, and host arrays packed into bytes.

Orbax hands back flipped bits without a word (its format has no checksum over a chunk), so a manifest is
written with each step and compared before anything is restored.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import UInt8

from dapo_jax.storage import entries, files_below, in_bucket

MANIFEST = "sha256.json"

_UNFINISHED = ".orbax-checkpoint-tmp"
"""What orbax appends to the name of a step that is being written."""

_COMMITTED = "commit_success.txt"
"""What orbax writes last into a step in a bucket, where nothing can be renamed."""

_UNSEALED = {MANIFEST, "_CHECKPOINT_METADATA", _COMMITTED}
"""Written or changed by orbax after the manifest; none of them holds a value that is restored."""

_READ_BYTES = 1 << 24


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
        RuntimeError: a file is changed, missing or surplus, or there is no manifest.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise RuntimeError(
            f"checkpoint {folder} has no {MANIFEST}: it is damaged, or dapo_jax did not write it"
        )
    try:
        expected: dict[str, str] = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"{manifest} cannot be read ({error}): the checkpoint is damaged") from error
    names = _files(folder)
    if difference := sorted(set(names) ^ expected.keys()):
        state = "missing" if difference[0] in expected else "not of this checkpoint"
        raise RuntimeError(
            f"checkpoint {folder} is damaged: {difference[0]} is {state}; restore another step"
        )
    index, count = share
    for name, digest in _digests(folder, names[index::count]).items():
        if digest != expected[name]:
            raise RuntimeError(
                f"checkpoint {folder} is damaged: {name} has sha256 {digest[:12]}..., written with "
                f"{expected[name][:12]}...; restore another step"
            )


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
