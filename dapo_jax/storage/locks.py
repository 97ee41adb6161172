"""Ensures that only one run at a time writes to a folder, namely the run that holds the folder's lock. The lock is advisory.

In a local folder, the lock is `flock` on the file `.lock`. The operating system releases it when the process ends. If the file was
removed or renamed, another run could lock a new file. So the holder checks that the file still exists before it writes.

In a bucket, the lock is a lease: an object `.lock` that a thread renews every `RENEW_S` seconds. It expires if it is not renewed for
`LEASE_S` seconds by the storage's clock. Each write to the lease specifies the object generation that it replaces. So only one of two runs can
take over an expired lease, and a holder that was suspended for too long detects that it has lost the lease.
"""

import errno
import fcntl
import importlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dapo_jax.storage import SCHEME, AnyPath, in_bucket

NAME = ".lock"
"""Name of the lock file or object in the folder."""

LEASE_S = 60.0
"""Seconds without a renewal after which a lease in a bucket expires. After a run is killed, the next run waits this long."""

RENEW_S = 15.0
"""Seconds between renewals by the holder."""

_LOOK_S = 1.0
_CLOCKS_S = 240.0
"""Maximum assumed difference, in seconds, between the clocks of this machine and the storage."""
_LEAVES = "This run ends and writes nothing more there"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class LockedError(RuntimeError):
    """The lock cannot be acquired. The message names the holder or gives the reason."""


class LockLostError(RuntimeError):
    """Another run may hold the lock now. This run must not write to the folder any more."""


Lost = Callable[[int, str], Any]
"""A function that ends the run after its lease was lost. It is called with an exit status and a message, in the thread that detects the loss."""


def take(folder: AnyPath, *, lost: Lost) -> "Lock":
    """Acquires the lock on `folder`, which is created if necessary. Use the lock as a context manager.

    If another process holds the lease in a bucket, waits for a renewal. Raises LockedError if the lease is renewed, and takes it over if it expires.

    Raises:
        LockedError: another process holds the lock, or the folder is not writable.
        OSError: the disk is full or broken.
    """
    return _Lease(folder, lost) if in_bucket(folder) else _FileLock(Path(folder))


def check_free(folder: Path) -> None:
    """Raises LockedError, which names the process, if a run is active in a local folder. Writes nothing."""
    if is_held(folder):
        raise _taken_by((folder / NAME).read_bytes())


def is_held(folder: AnyPath) -> bool | None:
    """Returns whether a run is active in the folder, or None if this is unknown, for example in a folder copied from another machine."""
    file = folder / NAME
    try:
        if not isinstance(file, Path):
            return time.time() - file.stat().mtime < LEASE_S + _CLOCKS_S
        with file.open("rb") as lock:
            holder = lock.read()
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False if json.loads(holder)["host"] == socket.gethostname() else None
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False if in_bucket(folder) else None
    except (OSError, ValueError):  # the file system has no locks, or the file is incomplete
        return None


class Lock(AbstractContextManager["Lock"]):
    """A lock that this process holds. Forked child processes do not hold it."""

    note = ""
    """A remark for the user about how the lock was acquired. May be empty."""

    @abstractmethod
    def check(self) -> None:
        """Raises LockLostError if the lock was lost. Must be called before writing a file that another run might also write."""

    @abstractmethod
    def release(self) -> None:
        """Releases the lock. A second call has no effect."""

    def __exit__(self, *_: object) -> None:
        self.release()


class _FileLock(Lock):
    def __init__(self, folder: Path) -> None:
        self._path = folder.absolute() / NAME  # absolute, because the working directory may change
        self._folder_is_new, self._file = not os.path.exists(folder), -1
        try:
            while not self._locked():  # the file was removed between opening and locking it
                self._close()
        except OSError as error:
            self._close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            raise LockedError(f"{self._path} cannot be written ({error.strerror}): choose another") from error
        os.register_at_fork(after_in_child=self._close)

    def _locked(self) -> bool:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            try:
                fcntl.flock(self._file, exclusive)
            except BlockingIOError:  # `is_held` in another process may hold the lock briefly
                time.sleep(0.1)
                fcntl.flock(self._file, exclusive)
        except BlockingIOError:
            holder = os.pread(self._file, 1000, 0)
            self._close()
            raise _taken_by(holder) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            self.note = f"{self._path} cannot be locked ({error.strerror}): a second run in this folder would not be detected"
        if not self._has_name():
            return False
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, _holder(), 0)
        return True

    def _has_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def check(self) -> None:
        if not self._has_name():
            raise LockLostError(
                f"{self._path} was removed, renamed or replaced, so another run may be at work there. {_LEAVES}; resume from the "
                "last checkpoint when no other run is active there"
            )

    def release(self) -> None:
        """Releases the lock, and removes the folder if it was created for the lock and nothing else was written there."""
        if self._file < 0:
            return
        with suppress(OSError):
            if self._folder_is_new and self._has_name() and os.listdir(self._path.parent) == [NAME]:
                self._path.unlink()
                self._path.parent.rmdir()
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough if a child process inherited it
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Lease(Lock):
    def __init__(self, folder: AnyPath, lost: Lost) -> None:
        self._name, self._lost, self._process = f"{folder}/{NAME}", lost, os.getpid()
        bucket, _, self._object = self._name.removeprefix(SCHEME).partition("/")
        self._errors: Any = importlib.import_module("google.api_core.exceptions")
        refusals = importlib.import_module("google.auth.exceptions").GoogleAuthError
        self._retry: Any = importlib.import_module("google.cloud.storage.retry").DEFAULT_RETRY
        self._failures = (self._errors.GoogleAPIError, refusals, OSError)  # network failures are OSErrors
        self._me, self._generation, self._renewed = _holder(), 0, 0.0
        self._renewing, self._ended, self._lost_to = threading.Lock(), threading.Event(), ""
        try:
            self._bucket = importlib.import_module("google.cloud.storage").Client().bucket(bucket)
            self._take()
        except self._failures as error:
            raise LockedError(
                f"{self._name} cannot be accessed ({error}): the bucket must exist and be reachable, and this user needs "
                "roles/storage.objectUser on it"
            ) from error
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raises LockLostError if the lease was lost. If it may have expired, tries to renew it first, with retries."""
        if not self._lost_to and time.monotonic() - self._renewed <= LEASE_S:
            return
        try:
            self._renew(retry=self._retry.with_timeout(LEASE_S))
        except self._failures as error:
            raise LockLostError(
                f"{self._name} was not renewed for {LEASE_S:.0f} s, and renewing it failed ({error}), so another run may have it. "
                f"{_LEAVES}; resume from the last checkpoint once the bucket can be reached"
            ) from error

    def release(self) -> None:
        if self._ended.is_set() or os.getpid() != self._process:
            return
        self._ended.set()
        with self._renewing, suppress(Exception):  # A failure is harmless, because the lease expires.
            self._bucket.blob(self._object).delete(if_generation_match=self._generation, timeout=RENEW_S)

    def _take(self) -> None:
        probe = self._bucket.blob(f"{self._object}-{secrets.token_hex(4)}")
        probe.upload_from_string(b"")
        ahead_s = probe.updated.timestamp() - time.monotonic()  # offset of the storage's clock
        probe.delete()
        first = 0
        while True:
            generation, renewed, holder = self._stored()
            if first and generation not in (0, first):
                raise _taken_by(holder)
            left_s = renewed + LEASE_S - (time.monotonic() + ahead_s) if generation else 0.0
            if left_s <= 0 and self._write(generation):
                self.note = f"took over the lease of {_name(holder)}, which has expired" if generation else ""
                return
            if generation and not first and left_s > 0:
                waiting = f"waiting up to {left_s:.0f} s to see whether it is renewed"
                print(f"{self._name} is held by {_name(holder)}: {waiting}", file=sys.stderr, flush=True)
            first = generation or first
            time.sleep(max(0.0, min(_LOOK_S, left_s)))

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._renew(retry=None)
            except LockLostError as error:
                self._lost(1, str(error))
                return
            except Exception:  # the storage does not answer; the lease is kept until another run takes it
                continue

    def _renew(self, *, retry: Any) -> None:
        with self._renewing:
            if self._ended.is_set():
                return
            if not self._lost_to and not self._write(self._generation, timeout=RENEW_S, retry=retry):
                self._lost_to = _name(self._stored()[2])
            if self._lost_to:
                raise LockLostError(
                    f"{self._name} is now held by {self._lost_to}, because this run did not renew it for {LEASE_S:.0f} s. {_LEAVES}; "
                    "the other run continues from the last checkpoint"
                )

    def _write(self, generation: int, **options: Any) -> bool:
        """Writes the lease, replacing `generation` (0 if there is no lease). Returns False if another run has written the lease."""
        began = time.monotonic()
        blob = self._bucket.blob(self._object)
        try:
            blob.upload_from_string(self._me, if_generation_match=generation, **options)
            self._generation = int(blob.generation)
        except self._errors.PreconditionFailed:
            generation_now, _, holder = self._stored()
            if not generation_now:  # the lease was deleted by hand, so a new lease is written
                return bool(generation) and self._write(0, **options)
            if holder != self._me:  # if equal, an earlier attempt of this write has already succeeded
                return False
            self._generation = generation_now
        self._renewed = began
        return True

    def _stored(self) -> tuple[int, float, bytes]:
        """Returns the lease's generation, renewal time by the storage's clock, and contents. If there is no lease, they are 0, 0 and empty."""
        while (blob := self._bucket.get_blob(self._object)) is not None:
            with suppress(self._errors.NotFound, self._errors.PreconditionFailed):  # try again if it changed
                data = blob.download_as_bytes(if_generation_match=blob.generation)
                return int(blob.generation), blob.updated.timestamp(), data
        return 0, 0.0, b""


def _holder() -> bytes:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "key": secrets.token_hex(8)}
    return json.dumps(about).encode() + b"\n"


def _name(holder: bytes) -> str:
    try:
        about = json.loads(holder)
    except ValueError:  # the file is incomplete
        return "another process"
    if (about["pid"], about["host"]) == (os.getpid(), socket.gethostname()):
        return "this process itself"
    return f"process {about['pid']} on {about['host']} since {about['since']}"


def _taken_by(holder: bytes) -> LockedError:
    return LockedError(f"in use by {_name(holder)}: wait until it ends, stop it, or choose another folder")
