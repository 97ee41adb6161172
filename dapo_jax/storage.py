"""Where files lie: in a local folder, or in a bucket of Google Cloud Storage (`gs://bucket/folder`).

Only this module knows how the two differ. A local path is a `pathlib.Path`. A path in a bucket is an `epath.Path`, with the
same methods, and is reached through gcsfs; orbax's arrays go through tensorstore. What is different in a bucket:

* a file is an object. It is there whole or not at all, it is replaced but never appended to or renamed;
* a folder is what names begin with: one without objects is not there, and none has to be made.

The variables that the clients know point all of them elsewhere: STORAGE_EMULATOR_HOST (gcsfs and google-cloud-storage),
TENSORSTORE_GCS_HTTP_URL (tensorstore), and FSSPEC_GCS_TOKEN=anon for gcsfs without credentials.
"""

import errno
import functools
import importlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from etils import epath

from dapo_jax.extras import how_to_install

AnyPath: TypeAlias = Path | epath.Path
"""A local path, or one in a bucket."""

SCHEME = "gs://"

_PIECE_BYTES, _AT_ONCE = 1 << 25, 16
"""A range of an object is fetched in pieces of so many bytes, so many of them at once: one connection gives a part of what a network can."""

_Found = TypeVar("_Found")

# epath would go through TensorFlow wherever that is installed, which takes seconds to load and has errors of its own.
os.environ.setdefault("EPATH_USE_TF", "false")
# gcsfs would ask another service, one without an emulator, of which kind each bucket is.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


def path_of(text: str | PathLike[str]) -> AnyPath:
    """The path that `text` names; `~` is the home folder.

    Raises:
        ValueError: it lies in a bucket and gcsfs is not installed, or it is of another kind of storage.
    """
    name = os.fspath(text)
    if "://" not in name:
        return Path(name).expanduser()
    if not name.startswith(SCHEME):
        raise ValueError(f"{name} is neither a local path nor in a bucket; a bucket's begins with {SCHEME}")
    if not name.removeprefix(SCHEME).split("/")[0]:
        raise ValueError(f"{name} names no bucket; write {SCHEME}BUCKET/FOLDER")
    _objects()
    return epath.Path(name)


def in_bucket(path: str | PathLike[str]) -> bool:
    """True if `path` lies in a bucket."""
    return os.fspath(path).startswith(SCHEME)


def check_access(folder: AnyPath, *, write: bool) -> None:
    """Tries what a run will do: ask about the bucket, list `folder`, and with `write` write an object there and delete it.

    A local folder must have a name that the system takes. With `write` the system is asked whether the folder can be written to.

    Raises:
        ValueError: one of these was refused; says which, and why.
    """
    if not in_bucket(folder):
        _check_name(Path(folder))
        if write:
            _check_writable(Path(folder))
        return
    bucket = str(folder).removeprefix(SCHEME).split("/")[0]
    deed = f"asking about the bucket {bucket!r}"
    try:
        # As orbax does before it lists or removes checkpoints, with the same client.
        client = importlib.import_module("google.cloud.storage").Client()
        patience = importlib.import_module("google.cloud.storage.retry").DEFAULT_RETRY.with_timeout(20.0)
        client.get_bucket(bucket, retry=patience)
        deed = f"listing {folder}"
        with suppress(FileNotFoundError):
            _objects().ls(str(folder))
        if write:
            deed = f"writing to {folder}"
            probe = str(folder / f"access-{secrets.token_hex(4)}")
            _objects().pipe_file(probe, b"")
            deed = f"deleting from {folder}"
            _objects().rm_file(probe)
    except Exception as error:  # each of the clients has its own kinds
        raise ValueError(
            f"{deed} failed: {_said(error)}; the bucket must exist, and whoever runs this needs "
            f"{'roles/storage.objectUser' if write else 'roles/storage.objectViewer'} and storage.buckets.get "
            "(roles/storage.legacyBucketReader) on it"
        ) from error


def _check_name(folder: Path) -> None:
    """Refuses a name that no local folder can have, such as one of 300 letters."""
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"the system takes no such name of {len(str(folder))} characters ({why}); choose another"
        ) from error


def _check_writable(folder: Path) -> None:
    """Refuses a local folder in which nothing can be made, or that cannot be made where it is to be."""
    place = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), Path())
    if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        why = "it lies on a read-only file system" if read_only else "this user may not write there"
        raise ValueError(f"nothing can be written to {place.absolute()}: {why}; choose another folder")
    if os.path.isdir(folder) and not os.access(folder, os.R_OK):
        raise ValueError(
            f"{folder.absolute()} cannot be listed: this user may not read there; choose another folder"
        )
    if place.is_symlink() and not place.exists():
        raise ValueError(
            f"{place} is a link to {os.readlink(place)}, which is not there; make that folder, or choose another one"
        )
    if place != folder and not place.is_dir():
        raise ValueError(f"{place} is no folder, so {folder} cannot be made; choose another folder")


def entries(folder: AnyPath) -> list[AnyPath]:
    """Everything that lies in `folder`, sorted; nothing if it is not there."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def size_of(path: AnyPath) -> int:
    """Bytes of a file."""
    if not in_bucket(path):
        return Path(path).stat().st_size
    return int(_asked(path, lambda: _objects().info(str(path)))["size"])


def files_below(folder: AnyPath) -> list[AnyPath]:
    """Every file in `folder` and in the folders within, sorted."""
    if in_bucket(folder):
        return [epath.Path(SCHEME + name) for name in _objects().find(str(folder))]
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def sizes_below(folder: AnyPath) -> dict[str, int]:
    """The bytes of every file in `folder` and in the folders within, by its path from there, sorted.

    Raises:
        OSError: something there is neither a file nor a folder (reading a pipe or a device may have no end), or a folder
            cannot be listed.
    """
    if in_bucket(folder):
        found = _objects().find(str(folder), detail=True)
        start = len(str(folder).removeprefix(SCHEME)) + 1
        return {name[start:]: int(each["size"]) for name, each in sorted(found.items())}
    sizes: dict[str, int] = {}
    for place, _, names in os.walk(folder, onerror=_raised):
        for path in (Path(place, name) for name in names):
            check_file(path)
            sizes[path.relative_to(folder).as_posix()] = size_of(path)
    return dict(sorted(sizes.items()))


def md5s_below(folder: AnyPath) -> dict[str, str]:
    """The md5 that a bucket keeps of every object below `folder`, in its spelling, by the path from there; nothing on a disk.

    An object that was put together of several has none.
    """
    if not in_bucket(folder):
        return {}
    found = _objects().find(str(folder), detail=True)
    start = len(str(folder).removeprefix(SCHEME)) + 1
    return {name[start:]: each["md5Hash"] for name, each in sorted(found.items()) if each.get("md5Hash")}


def _raised(error: OSError) -> None:
    raise error


def bounded_bytes(path: AnyPath, *, at_most: int) -> bytes:
    """The content of a file that is not larger.

    Raises:
        OSError: it is larger, not there, no file, or cannot be read.
    """
    if not in_bucket(path):
        check_file(Path(path))
    with path.open("rb") as file:
        content = file.read(at_most + 1)
    if len(content) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes", str(path))
    return content


def check_file(path: Path) -> None:
    """Refuses what is no file: reading a pipe or a device may have no end.

    Raises:
        OSError: it is not there, or none.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))


def file_bytes(path: AnyPath) -> bytes:
    """The content of a file.

    Raises:
        OSError: it is not there, no file, or cannot be read.
    """
    if in_bucket(path):
        return _asked(path, lambda: _objects().cat_file(str(path)))
    check_file(Path(path))
    return path.read_bytes()


def files_of(folder: AnyPath, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of those of the named files that `folder` holds.

    Raises:
        OSError: one is there and cannot be read.
    """
    found: dict[str, bytes] = {}
    for name in names:
        if in_bucket(folder):
            with suppress(FileNotFoundError):
                found[name] = file_bytes(folder / name)
        elif (folder / name).is_file():
            found[name] = file_bytes(folder / name)
    return found


def ranges_bytes(path: AnyPath, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of each range (start, stop) of a file; of an object in a bucket these alone are fetched, several ranges at a time.

    Raises:
        OSError: the file is not there, no file, shorter, or cannot be read.
    """
    if in_bucket(path):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(lambda each: _fetched(path, *each), ranges))
    else:
        check_file(Path(path))
        with path.open("rb") as file:
            found = [_part(file, *each) for each in ranges]
    for (start, stop), data in zip(ranges, found, strict=True):
        if len(data) != stop - start:
            raise OSError(errno.EIO, f"it ends at byte {start + len(data):,}, needed was {stop:,}", str(path))
    return found


def range_bytes(path: AnyPath, start: int, stop: int) -> bytes:
    """The bytes of a file from `start` up to `stop`; of an object in a bucket these alone are fetched, in pieces if they are many.

    Raises:
        OSError: as `ranges_bytes`.
    """
    if not in_bucket(path):
        return ranges_bytes(path, [(start, stop)])[0]
    starts = range(start, stop, _PIECE_BYTES)
    return b"".join(ranges_bytes(path, [(at, min(at + _PIECE_BYTES, stop)) for at in starts]))


def _part(file: IO[bytes], start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)


def _fetched(path: AnyPath, start: int, stop: int) -> bytes:
    return _asked(path, lambda: _objects().cat_file(str(path), start=start, end=stop))


def _asked(path: AnyPath, ask: Callable[[], _Found]) -> _Found:
    """The answer of the storage about an object.

    Raises:
        OSError: there is none, or the storage does not hand it out; says why.
    """
    try:
        return ask()
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except Exception as error:  # each of the clients has its own kinds
        said = _said(error)
        remedy = "; whoever runs this needs roles/storage.objectViewer on the bucket" * (
            "storage.objects." in said
        )
        raise OSError(errno.EIO, f"{said}{remedy}", str(path)) from error


def move_folder(folder: AnyPath, place: AnyPath) -> None:
    """Renames a folder; in a bucket, where names are all there is, object by object."""
    if in_bucket(folder):
        for file in files_below(folder):
            _objects().mv_file(str(file), str(place / file.relative_to(folder).as_posix()))
    else:
        os.replace(folder, place)


def write_whole(path: AnyPath, data: bytes) -> None:
    """Writes a file that is there whole or not at all; one of that name is replaced.

    Raises:
        OSError: it cannot be written; the message names the file.
    """
    if not in_bucket(path):
        with new_file(path) as file:
            file.write(data)
        return
    try:
        _objects().pipe_file(str(path), data)
    except Exception as error:
        raise OSError(f"cannot write {path}: {_said(error)}") from error


@contextmanager
def new_file(path: AnyPath) -> Iterator[IO[bytes]]:
    """A file to write, larger than memory if need be. It gets its name when the block ends; after an error there is none.

    Raises:
        OSError: it cannot be written, or what has the name is no file; a link is followed.
    """
    if in_bucket(path):
        # One client for this module alone: a transaction is of all that a client writes while it lasts.
        with _objects().transaction, _objects().open(str(path), "wb") as file:
            yield file
        return
    place = _replaceable(path)
    partial = place.with_name(place.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        # Exclusively: a link that somebody put there under this name is not followed.
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, place)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _replaceable(path: AnyPath) -> Path:
    """The place of the file that `path` names, links followed: the link stays, and the file it leads to is replaced.

    Raises:
        OSError: there is something other than a file, such as a device, which a rename would remove.
    """
    place = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        check_file(place)
    return place


@functools.cache
def _objects() -> Any:
    """This module's client of the storage; and epath's is told to hold no listings, in which tensorstore's objects lack."""
    try:
        importlib.import_module("gcsfs")
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise ValueError(
            f"files in a bucket need the package gcsfs ({error}): {how_to_install('gcs')}"
        ) from error
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return fsspec.filesystem("gcs", skip_instance_cache=True)


def _said(error: Exception) -> str:
    """The words of a client's error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
