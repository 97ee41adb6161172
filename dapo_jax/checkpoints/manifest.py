"""Checkpoints add to orbax a sha256 manifest of their files, a description of themselves, and host arrays packed into bytes.

Orbax hands back flipped bits without a word (its format has no checksum over a chunk), so a manifest is
written with each step and compared before anything is restored.

A manifest can be made anew for files of any content, so nothing that a checkpoint says is believed: sizes are compared before
anything is read, and whatever is not as this module writes it is a `DamagedError`.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jaxtyping import PyTree, UInt8

from dapo_jax.plain_json import read_object
from dapo_jax.storage import bounded_bytes, entries, in_bucket, md5s_below, move_folder, sizes_below

MANIFEST = "sha256.json"

META = "meta/metadata"
"""The file that orbax makes of the item `meta`."""

MAX_NOTE_BYTES = 1 << 24
"""The largest manifest, `meta` or note of orbax's own that is read. A run of thousands of files has a tenth of it."""

_UNFINISHED = ".orbax-checkpoint-tmp"
"""Orbax appends this to the name of a step that is being written."""

_COMMITTED = "commit_success.txt"
"""Orbax writes this file last into a step in a bucket, where nothing can be renamed."""

_NOTE = "_CHECKPOINT_METADATA"
"""Orbax writes this file into a step beside its items, and reads it whenever it lists the steps."""

_UNSEALED = {MANIFEST, _NOTE, _COMMITTED}
"""Written or changed by orbax after the manifest; none of them holds a value that is restored."""

_READ_BYTES = 1 << 24

_MOST_SHRUNK = 1 << 15
"""Bytes that one byte of a compressed chunk can stand for: zstd writes a block of 128 KiB of one value in 4 bytes."""

_DEEPEST = 100
"""Lists and dicts inside one another in a checkpoint's progress."""

_ELEMENT_BYTES, _SPARE_BYTES = 16, 1 << 26
"""The most that the files of a state can take: twice the widest number for each element, and as much besides for what
describes them and for the rows that fill up a vocabulary."""

_DTYPE = re.compile(r"[<>|=]?\w+(\[\w+\])?")

_MOST_AXES, _MOST_BYTES = 64, np.iinfo(np.intp).max
"""The most that an array of numpy can have; axes without entries count as one then."""

_Value = TypeVar("_Value")

_FAILING_DISK = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written."""


def unreadable(folder: epath.Path, error: Exception) -> CheckpointError:
    """The error to raise where reading a checkpoint has failed.

    It is a DamagedError, for which the checkpoint is passed over, unless the failure says nothing of what was written.
    """
    where = f"checkpoint {folder} cannot be read: {str(error) or type(error).__name__}"
    remedy = _remedy(error)
    if not remedy:
        return DamagedError(where)
    return CheckpointError(f"{where}. It may be whole, and was left as it is: {remedy}")


def _remedy(error: Exception) -> str:
    """The remedy for a failure that is none of the checkpoint's; empty if it may be damaged."""
    number = getattr(error, "errno", None)
    # XLA and tensorstore have no classes for these.
    short = "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
    if short or isinstance(error, MemoryError) or number == errno.ENOMEM:
        return "free memory on host and device, or use more of either"
    if isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error):
        return "let this user read it"
    if number in _FAILING_DISK:
        return "try again, and if the disk stays so, move this checkpoint away"
    return ""


def step_folders(folder: epath.Path) -> list[epath.Path]:
    """The steps in `folder` that are complete, whole or damaged: they have their final name, and in a bucket their marker."""
    return [path for path in _listed(folder) if is_step(path)]


def is_step(path: epath.Path) -> bool:
    """True for the folder of a complete step; digits of other scripts, and zeros in front, are of none."""
    if not (path.name.isascii() and path.name.isdigit() and path.name == str(int(path.name))):
        return False
    return (path / _COMMITTED).exists() if in_bucket(path) else path.is_dir()


def _listed(folder: epath.Path) -> list[epath.Path]:
    """Everything in the folder of all checkpoints; nothing if it is not there.

    Raises:
        CheckpointError: it cannot be listed, or is a link to nothing, as to a disk that is not mounted.
    """
    if os.path.islink(folder) and not os.path.exists(folder):
        raise CheckpointError(
            f"{folder} is a link to {os.readlink(folder)}, which is not there: mount its disk, or remove the link"
        )
    try:
        return [epath.Path(path) for path in entries(folder)]
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be listed ({error.strerror or error}): it must be a folder that this user may read"
        ) from error


def set_aside(folder: epath.Path) -> str:
    """Renames a damaged checkpoint to STEP.damaged, which nothing takes for a checkpoint, and returns its new path.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    names = (f"{folder.name}.damaged{number}" for number in itertools.chain([""], itertools.count(2)))
    try:
        place = next(place for place in map(folder.with_name, names) if not _is_taken(place))
        move_folder(folder, place)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged, and cannot be renamed to {folder.name}.damaged ({error.strerror or error}): move it "
            "away, or see to it that this user may rename it"
        ) from error
    return str(place)


def _is_taken(place: epath.Path) -> bool:
    return place.exists() or os.path.islink(place)


def remove_unfinished(folder: epath.Path) -> None:
    """Removes the steps in `folder` that a killed run was writing: they are never whole, and never read."""
    for path in _listed(folder):
        named = in_bucket(path) and path.name.isdigit()
        if not (_UNFINISHED in path.name or (named and not (path / _COMMITTED).exists())):
            continue
        if os.path.islink(path):
            path.unlink()  # what it leads to stays
        else:
            path.rmtree()


def check_notes(folder: epath.Path) -> None:
    """Refuses a folder in which orbax would not come to an end of listing the steps.

    Raises:
        DamagedError: names the step.
        CheckpointError: the folder, or a step in it, cannot be read.
    """
    if in_bucket(folder):
        return
    for note in [step / _NOTE for step in _listed(folder)]:
        try:
            if not note.is_dir():
                bounded_bytes(note, at_most=MAX_NOTE_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if _remedy(error):
                raise unreadable(note.parent, error) from error
            raise DamagedError(f"checkpoint {note.parent} is damaged, move it away: {error}") from error


def being_written(path: epath.Path) -> epath.Path:
    """The place of a step, or of an item in it, while orbax writes it: on a disk it has another name until it is complete."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    return unfinished if unfinished.exists() else path


@dataclass(frozen=True)
class SealedFile:
    """A file of a checkpoint as its manifest has it."""

    bytes: int
    sha256: str
    md5: str = ""
    """The bucket's own digest of it, in the bucket's spelling; empty where it has none, and on a disk."""


def write_manifest(folder: epath.Path, known: Mapping[str, SealedFile] | None = None) -> None:
    """Writes size and sha256 of every file under `folder` into `folder/sha256.json`; in a bucket also the md5 that it has of them.

    Args:
        folder: of a step, complete but for its final name, or its marker file.
        known: files that need not be read, since whoever has written them has hashed them.

    Raises:
        CheckpointError: one of these is not there, or has another size.
    """
    sizes, known = _sealed(sizes_below(folder)), known or {}
    for name, file in known.items():
        if sizes.get(name) != file.bytes:
            found = f"{sizes[name]:,} bytes" if name in sizes else "no such file"
            raise CheckpointError(
                f"{folder / name} has {file.bytes:,} bytes where it was written, and the first process finds {found}: put the "
                "checkpoints on a disk or into a bucket that all processes see"
            )
    files = {**_digested(folder, {name: sizes[name] for name in sizes.keys() - known.keys()}), **known}
    content = {"files": {name: files[name].sha256 for name in sizes}, "sizes": sizes}
    if md5s := {name: files[name].md5 for name in sizes if files[name].md5}:
        content["md5"] = md5s
    (folder / MANIFEST).write_text(json.dumps(content, indent=1))


def digested(folder: epath.Path) -> dict[str, SealedFile]:
    """Every file under `folder`, read and hashed, by its path there."""
    return _digested(folder, sizes_below(folder))


def _digested(folder: epath.Path, sizes: Mapping[str, int]) -> dict[str, SealedFile]:
    # Asked for before anything is read: of an object that is replaced meanwhile it is then another, and a restore reads the object.
    md5s = md5s_below(folder)
    digests = _digests(folder, sizes)
    return {name: SealedFile(size, digests[name], md5s.get(name, "")) for name, size in sizes.items()}


def check_manifest(folder: epath.Path, *, share: tuple[int, int] = (0, 1)) -> None:
    """Compares every file under `folder` with the manifest.

    Args:
        folder: a complete checkpoint.
        share: (index, count): read only every count-th file, so that processes divide the work.

    Raises:
        DamagedError: a file is changed, missing or surplus, or there is no manifest.
    """
    check_digests(folder, sealed_files(folder), share=share)


def sealed_files(folder: epath.Path) -> dict[str, SealedFile]:
    """The manifest's entry of each file under `folder`, by its path there; names and sizes are those of the files.

    Only the manifest is read, so this takes no longer for a file that has grown.

    Raises:
        DamagedError: a file is missing, surplus or of another size, something is no file, or there is no manifest.
        CheckpointError: as `unreadable` has it.
    """
    try:
        there = sizes_below(folder)
    except OSError as error:
        raise unreadable(folder, error) from error
    if MANIFEST not in there:
        raise DamagedError(
            f"checkpoint {folder} has no {MANIFEST}: it is damaged, or dapo_jax did not write it"
        )
    sealed = _sealed(there)
    for name in [name for name in there if name not in sealed or name == META]:
        if there[name] > MAX_NOTE_BYTES:
            raise DamagedError(
                f"checkpoint {folder} is damaged: {name} has {there[name]:,} bytes, and at most {MAX_NOTE_BYTES:,} are read"
            )
    digests, sizes, md5s = _read_manifest(folder)
    if difference := sorted(sealed.keys() ^ digests.keys()):
        state = "missing" if difference[0] in digests else "not of this checkpoint"
        raise DamagedError(f"checkpoint {folder} is damaged: {difference[0]} is {state}")
    for name, size in sizes.items():
        if sealed.get(name) != size:
            raise DamagedError(
                f"checkpoint {folder} is damaged: {name} has {sealed.get(name, 0):,} bytes, written with {size:,}"
            )
    return {name: SealedFile(sealed[name], digest, md5s.get(name, "")) for name, digest in digests.items()}


def check_digests(
    folder: epath.Path, files: Mapping[str, SealedFile], *, share: tuple[int, int] = (0, 1)
) -> None:
    """Compares what is in the files with their sha256; arguments and errors as `check_manifest`.

    A bucket keeps an md5 of what it holds. A file of which that is still the one in the manifest is not read.
    """
    index, count = share
    mine = {name: files[name] for name in sorted(files)[index::count]}
    try:
        md5s = md5s_below(folder) if any(file.md5 for file in mine.values()) else {}
        mine = {name: file for name, file in mine.items() if not file.md5 or md5s.get(name) != file.md5}
        found = _digests(folder, {name: file.bytes for name, file in mine.items()})
    except (OSError, MemoryError) as error:
        raise unreadable(folder, error) from error
    for name, digest in found.items():
        if digest != mine[name].sha256:
            raise DamagedError(
                f"checkpoint {folder} is damaged: {name} has sha256 {digest[:12]}..., written with "
                f"{mine[name].sha256[:12]}..."
            )


def check_room(
    folder: epath.Path, files: Mapping[str, SealedFile], target: Iterable[jax.ShapeDtypeStruct]
) -> None:
    """Refuses a state whose files are larger than the target's arrays can make them, before they are read.

    Raises:
        DamagedError: as said.
    """
    found = sum(file.bytes for name, file in files.items() if name.startswith("state/"))
    most = _ELEMENT_BYTES * sum(math.prod(struct.shape) for struct in target) + _SPARE_BYTES
    if found > most:
        raise DamagedError(
            f"checkpoint {folder} is damaged: the files of its state have {found:,} bytes, and the arrays of this run take at "
            f"most {most:,}"
        )


def check_unpacked(where: str, size: int, files: Mapping[str, SealedFile]) -> None:
    """Refuses to make room for more carried bytes than the files can hold.

    Raises:
        DamagedError: as said.
    """
    found = sum(file.bytes for name, file in files.items() if name.startswith("carry/"))
    if size > found * _MOST_SHRUNK:
        raise DamagedError(
            f"{where} is damaged: it speaks of {size:,} carried bytes, and their files have {found:,}"
        )


@dataclass(frozen=True, kw_only=True)
class Meta:
    """A checkpoint's description of itself."""

    step: int | None
    """None in checkpoints that did not keep it yet."""
    progress: dict[str, Any]
    state: dict[str, Sequence[Any]]
    """Path -> shape, dtype."""
    carry: dict[str, dict[str, Any]]
    """The layout that `pack_arrays` gives."""
    score: float | None

    @property
    def carry_bytes(self) -> int:
        """The bytes of all that is carried."""
        return sum(entry["bytes"] for entry in self.carry.values())


def read_meta(folder: epath.Path, *, newest: int) -> Meta:
    """The description that the checkpoint `folder` holds of itself, checked down to what its users rely on.

    Args:
        folder: named by its step.
        newest: the latest version of the format that is known.

    Raises:
        DamagedError: it is of another step, or not as it was written.
        CheckpointError: it is of a newer version, or as `unreadable` has it.
    """
    where = f"checkpoint {folder}"
    try:
        meta = read_object(bounded_bytes(folder / META, at_most=MAX_NOTE_BYTES), META)
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error
    version = meta.get("schema_version")
    if not isinstance(version, int):
        raise DamagedError(f"{where} is damaged: schema_version is {version!r:.60}")
    if version > newest:
        raise CheckpointError(
            f"{where} has schema_version {version}; this version of dapo_jax reads up to {newest}: upgrade dapo_jax"
        )
    step, score = meta.get("step"), meta.get("score")
    if step is not None and not (_whole(step) and str(step) == folder.name):
        raise DamagedError(f"{where} is of step {step!r:.60}, and its folder was renamed")
    parts: dict[str, dict[str, Any]] = {}
    for name, holds in _HOLDS.items():
        part = meta.get(name)
        if not isinstance(part, dict) or not all(map(holds, part.values())):
            raise DamagedError(f"{where} is damaged: {name!r} in {META} is not as it was written")
        parts[name] = part
    if score is not None and not (isinstance(score, float | int) and abs(score) < math.inf):
        raise DamagedError(f"{where} is damaged: its score is {score!r:.60}")
    return Meta(step=step, score=score, **parts)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shape(value: object) -> bool:
    if not isinstance(value, list) or len(value) > _MOST_AXES or not all(map(_whole, value)):
        return False
    return _room_of(value) <= _MOST_BYTES


def _room_of(shape: Sequence[int]) -> int:
    """The entries that numpy looks for room for."""
    return math.prod(max(1, side) for side in shape)


def _is_array(entry: object) -> bool:
    """True for [shape, dtype], as the state's arrays are described."""
    return isinstance(entry, list) and len(entry) == 2 and _is_shape(entry[0]) and isinstance(entry[1], str)


def _is_packed(entry: object) -> bool:
    """True for what `pack_arrays` says of an array."""
    if not isinstance(entry, dict) or not _is_shape(entry.get("shape")) or not _whole(entry.get("bytes")):
        return False
    code = entry.get("dtype")
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        return False
    try:
        dtype = np.dtype(code)
    except (TypeError, ValueError):
        return False
    return (
        not dtype.hasobject
        and dtype.itemsize > 0
        and _room_of(entry["shape"]) * dtype.itemsize <= _MOST_BYTES
        and math.prod(entry["shape"]) * dtype.itemsize == entry["bytes"]
    )


_HOLDS = {"progress": lambda _: True, "state": _is_array, "carry": _is_packed}
"""The check of the values of each part of `meta`."""


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
    """A copy, down to its innermost lists, that reads back equal; or an error that names the entry."""
    copy: dict[str, Any] = {}
    for key, value in progress.items():
        try:
            # Python's own limit depends on its version, and a later one must be able to read it.
            same = not _is_deeper(value, _DEEPEST)
            copy[key] = json.loads(json.dumps(value, allow_nan=False)) if same else None
            same = same and copy[key] == value
        except (TypeError, ValueError):
            same = False
        if not (isinstance(key, str) and same):
            raise ValueError(
                f"progress[{key!r}] = {reprlib.repr(value)} does not survive JSON: use str keys, finite Python numbers, str, "
                f"bool, None, and lists and dicts that are at most {_DEEPEST} deep"
            )
    return copy


def _is_deeper(value: object, levels: int) -> bool:
    """True if there are more than so many lists and dicts inside one another."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inside is not None and (not levels or any(_is_deeper(one, levels - 1) for one in inside))


def _sealed(files: Mapping[str, _Value]) -> dict[str, _Value]:
    """The files of a checkpoint that its manifest lists, with what is known of each."""
    return {name: value for name, value in files.items() if name.rpartition("/")[2] not in _UNSEALED}


def _read_manifest(folder: epath.Path) -> tuple[dict[str, str], dict[str, int], dict[str, str]]:
    """sha256, size and md5 by path. Those of earlier versions of this library have no sizes; md5 only those written into a bucket."""
    try:
        content = read_object(bounded_bytes(folder / MANIFEST, at_most=MAX_NOTE_BYTES), MANIFEST)
        digests, sizes, md5s = content.get("files"), content.get("sizes", {}), content.get("md5", {})
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise ValueError("'files' must name a sha256 for each file")
        if not isinstance(md5s, dict) or not all(isinstance(digest, str) for digest in md5s.values()):
            raise ValueError("'md5' must name an md5 for each file")
        if not isinstance(sizes, dict) or not all(map(_whole, sizes.values())):
            raise ValueError("'sizes' must be bytes for each file")
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error
    return digests, sizes, md5s


def _digests(folder: epath.Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """The sha256 of each file's first bytes, as many as are given."""
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing and reading both release the interpreter lock
        found = pool.map(lambda name: _sha256(folder / name, sizes[name]), sizes)
        return dict(zip(sizes, found, strict=True))


def _sha256(path: epath.Path, left: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(min(left, _READ_BYTES)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
