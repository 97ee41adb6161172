"""Files in a local folder or in a Google Cloud Storage bucket (`gs://bucket/folder`).

Only this module handles the differences between folders and buckets. A local path is a `pathlib.Path`. A path in a bucket is an
`epath.Path`, which has the same methods. Files in buckets are accessed through gcsfs, and Orbax's arrays through TensorStore. In a bucket:

* a file is an object. It is either complete or missing. It can be replaced, but not appended to or renamed;
* a folder is a common prefix of object names. It exists while an object has this prefix, and is never created explicitly.

Environment variables can redirect the storage clients to an emulator: STORAGE_EMULATOR_HOST (gcsfs and google-cloud-storage) and
TENSORSTORE_GCS_HTTP_URL (TensorStore). With FSSPEC_GCS_TOKEN=anon, gcsfs uses no credentials.
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

from dapo_jax.hints import needing

AnyPath: TypeAlias = Path | epath.Path
"""A local path, or a path in a bucket."""

SCHEME = "gs://"

_PIECE_BYTES, _AT_ONCE = 1 << 25, 16
"""Piece size and number of concurrent requests for fetching a range of an object. A single connection cannot use the full bandwidth."""

_Answer = TypeVar("_Answer")

# Otherwise epath uses TensorFlow if it is installed, which takes seconds to load and has its own exceptions.
os.environ.setdefault("EPATH_USE_TF", "false")
# Otherwise gcsfs queries the type of each bucket from another service, for which there is no emulator.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


def path_of(text: str | PathLike[str]) -> AnyPath:
    """Converts a string to a path. `~` is expanded to the home folder. Raises ValueError if the path is in a bucket but gcsfs is not installed, or it is a URL
    other than `gs://BUCKET/...`."""
    name = os.fspath(text)
    if "://" not in name:
        return Path(name).expanduser()
    if not name.startswith(SCHEME) or name[len(SCHEME) :].startswith("/") or name == SCHEME:
        raise ValueError(f"{name} is neither a local path nor in a bucket; write {SCHEME}BUCKET/FOLDER")
    _objects()
    return epath.Path(name)


def in_bucket(path: str | PathLike[str]) -> bool:
    """Returns whether `path` is in a bucket."""
    return os.fspath(path).startswith(SCHEME)


def check_access(folder: AnyPath, *, write: bool) -> None:
    """Tests the operations that a run needs: reading the bucket's metadata, listing `folder`, and with `write`, writing and deleting.

    A local `folder` is tested only if `write` is True: the folder or its nearest existing parent must be writable. Raises ValueError if an operation failed.
    The message contains the operation and the reason.
    """
    if not in_bucket(folder):
        existing = next(path for path in (folder, *Path(folder).absolute().parents) if os.path.lexists(path))
        if write and not (existing.is_dir() and os.access(existing, os.R_OK | os.W_OK | os.X_OK)):
            raise ValueError(
                f"cannot write to {existing.absolute()}: it is not a folder, or this user has no write permission; choose another folder"
            )
        return
    bucket = str(folder).removeprefix(SCHEME).split("/")[0]
    operation = f"getting the metadata of bucket {bucket!r}"
    try:
        # Orbax makes the same request with the same client before it lists or removes checkpoints.
        client = importlib.import_module("google.cloud.storage").Client()
        patience = importlib.import_module("google.cloud.storage.retry").DEFAULT_RETRY.with_timeout(20.0)
        client.get_bucket(bucket, retry=patience)
        operation = f"listing {folder}"
        with suppress(FileNotFoundError):
            _objects().ls(str(folder))
        if write:
            operation = f"writing to {folder}"
            probe = str(folder / f"access-{secrets.token_hex(4)}")
            _objects().pipe_file(probe, b"")
            operation = f"deleting from {folder}"
            _objects().rm_file(probe)
    except Exception as error:  # the storage clients have no common error class
        raise ValueError(
            f"{operation} failed: {_message(error)}; the bucket must exist, and this user needs "
            f"{'roles/storage.objectUser' if write else 'roles/storage.objectViewer'} and storage.buckets.get "
            "(roles/storage.legacyBucketReader) on it"
        ) from error


def entries(folder: AnyPath) -> list[AnyPath]:
    """Returns the sorted entries of `folder`, or an empty list if it does not exist."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def size_of(path: AnyPath) -> int:
    """Returns the size of a file in bytes."""
    if in_bucket(path):
        return int(_answer(path, lambda: _objects().info(str(path)))["size"])
    return Path(path).stat().st_size


def files_below(folder: AnyPath) -> list[AnyPath]:
    """Returns every file in `folder` and its subfolders, sorted."""
    return [folder / name for name in stored_files(folder)]


def stored_files(folder: AnyPath) -> dict[str, tuple[int, str]]:
    """Returns a dict from the relative path of every file in `folder` and its subfolders to the file's size and md5, sorted by path.

    The md5 is the digest that the bucket reports, in base64. It is empty for local files and composite objects. Raises OSError if a folder cannot be listed.
    """
    files: dict[str, tuple[int, str]] = {}
    if in_bucket(folder):
        start = len(str(folder).removeprefix(SCHEME)) + 1
        for name, about in _objects().find(str(folder), detail=True).items():
            files[name[start:]] = int(about["size"]), about.get("md5Hash", "")
        return dict(sorted(files.items()))
    for parent, _, names in os.walk(folder, onerror=_raise_listing):
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError):  # the file was removed meanwhile, or is a broken link
                files[path.relative_to(folder).as_posix()] = path.stat().st_size, ""
    return dict(sorted(files.items()))


def _raise_listing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _check_file(path: Path) -> None:
    """Raises OSError if a path is not a regular file, because reading from a pipe or a device may block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a file", str(path))


def file_bytes(path: AnyPath) -> bytes:
    """Returns the contents of a file. Raises OSError if it does not exist or cannot be read."""
    if in_bucket(path):
        return _answer(path, lambda: _objects().cat_file(str(path)))
    _check_file(Path(path))
    return path.read_bytes()


def files_of(folder: AnyPath, names: Iterable[str]) -> dict[str, bytes]:
    """Returns the contents of the files `names` in `folder`. Missing files are omitted. Raises OSError if an existing file cannot be read."""
    contents: dict[str, bytes] = {}
    for name in names:
        with suppress(FileNotFoundError):
            contents[name] = file_bytes(folder / name)
    return contents


def ranges_bytes(path: AnyPath, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Returns the bytes in each `(start, stop)` range of a file. From a bucket, only these ranges are fetched, concurrently. Raises OSError if the file does
    not exist, is too short, or cannot be read."""

    def read(bounds: tuple[int, int]) -> bytes:
        start, stop = bounds
        if in_bucket(path):
            return _answer(path, lambda: _objects().cat_file(str(path), start=start, end=stop))
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        contents = list(pool.map(read, ranges) if in_bucket(path) else map(read, ranges))
    for (start, stop), data in zip(ranges, contents, strict=True):
        if len(data) != stop - start:
            raise OSError(errno.EIO, f"it ends at byte {start + len(data):,}, needs {stop:,}", str(path))
    return contents


def range_bytes(path: AnyPath, start: int, stop: int) -> bytes:
    """Returns the bytes of a file from `start` to `stop`, fetched from a bucket in concurrent pieces. Raises the same errors as `ranges_bytes`."""
    starts = range(start, stop, _PIECE_BYTES if in_bucket(path) else max(1, stop - start))
    return b"".join(ranges_bytes(path, [(at, min(at + starts.step, stop)) for at in starts]))


def _answer(path: AnyPath, ask: Callable[[], _Answer]) -> _Answer:
    """Sends the storage request `ask` for the object `path` and returns the answer. Raises OSError if the object is missing or the request fails."""
    try:
        return ask()
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except Exception as error:  # the storage clients have no common error class
        why = _message(error)
        if "storage.objects." in why:
            why += "; this user needs roles/storage.objectViewer on the bucket"
        raise OSError(errno.EIO, why, str(path)) from error


def move_folder(folder: AnyPath, target: AnyPath) -> None:
    """Renames a folder. In a bucket, its objects are moved one by one."""
    if in_bucket(folder):
        for name in stored_files(folder):
            _objects().mv_file(str(folder / name), str(target / name))
    else:
        os.replace(folder, target)


def write_whole(path: AnyPath, data: bytes) -> None:
    """Writes or replaces a file atomically, so that readers see either the old or the new contents. Raises OSError with the file's name."""
    if not in_bucket(path):
        with new_file(path) as file:
            file.write(data)
        return
    try:
        _objects().pipe_file(str(path), data)
    except Exception as error:
        raise OSError(f"cannot write {path}: {_message(error)}") from error


@contextmanager
def new_file(path: AnyPath) -> Iterator[IO[bytes]]:
    """Opens a new file for writing. It gets its final name when the `with` block ends. If the block raises, the file is removed. A device or a pipe is written
    directly. Raises OSError if the file cannot be written, or the name belongs to a folder."""
    if in_bucket(path):
        # A transaction covers all concurrent writes through a client, so only this module may use this client.
        with _objects().transaction, _objects().open(str(path), "wb") as file:
            yield file
        return
    if path.exists() and not (path.is_file() or path.is_dir()):
        with path.open("wb") as file:  # a rename would remove the device or pipe
            yield file
        return
    target = Path(os.path.realpath(path))  # a symbolic link is kept, and its target is replaced
    if target.exists():
        _check_file(target)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


@functools.cache
def _objects() -> Any:
    """Returns this module's storage client. Listings are not cached, because TensorStore also writes objects."""
    with needing("gcs", "buckets need the package gcsfs"):
        importlib.import_module("gcsfs")
        fsspec = importlib.import_module("fsspec")
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return fsspec.filesystem("gcs", skip_instance_cache=True)


def _message(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
