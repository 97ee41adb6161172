"""One run at a time in a folder: who has the folder's lock is the only one to write there. It is advisory: only those who ask are kept out.

In a local folder the lock is `flock` on the file `.lock`, which the system takes back from a process that ends, however it ends. The
file stays, but for a folder in which nothing was written; who has locked it looks whether it is still the one of this name, then and
before whatever it writes, or a file that was removed and made anew could be locked by two.

A bucket knows no locks. There it is a lease: an object `.lock` that is created only if there is none, written anew by a thread every
`RENEW_S`, and free once the storage's own clock says that this was not done for `LEASE_S`. Each write names the generation that it
replaces, so of two that take over an expired lease one gets it, and a holder that was away too long finds that it has lost it.
"""

import errno
import fcntl
import importlib
import json
import os
import secrets
import socket
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from dapo_jax.storage import SCHEME, AnyPath, in_bucket

NAME = ".lock"
"""The name of the file or object in the folder; whoever reads a run may pass over it."""

LEASE_S = 60.0
"""Seconds after which a lease in a bucket ends that is not renewed; a run waits that long where another was killed."""

RENEW_S = 15.0
"""Seconds between two renewals by its holder."""

_LOOK_S = 1.0
"""Seconds between two looks at a lease that is waited for."""

_BEGIN, _HOLDER_BYTES = b'{"pid":', 1000
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class LockedError(RuntimeError):
    """The lock cannot be had; says who has it since when, or what is in its way, and what to do."""


class LockLostError(RuntimeError):
    """The folder is another run's by now. Nothing may be written there any more."""


Lost = Callable[[int, str], Any]
"""Called with an exit status and a message in the thread that finds that a lease was lost; ends the run."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who has a lock."""

    pid: int
    host: str
    since: str
    """UTC."""
    key: str
    """Tells one taking of a lock from every other."""

    def __str__(self) -> str:
        # As written by whoever could write there: nothing that a terminal would obey.
        return f"process {self.pid} on {ascii(self.host)[1:-1]:.80} since {ascii(self.since)[1:-1]:.40}"


def take(folder: AnyPath, *, lost: Lost) -> "Lock":
    """Takes the lock of `folder`, which is made if it is not there. The lock is a context manager: leaving gives it back.

    A lease that another process holds is waited for until that renews it, or it has expired.

    Raises:
        LockedError: another has it, or nobody can have it; nothing was changed.
        OSError: the disk is full or broken.
    """
    return _Lease(folder, lost) if in_bucket(folder) else _FileLock(Path(folder))


def check_free(folder: Path) -> None:
    """Refuses a local folder in which a run is at work. Makes and writes nothing.

    Raises:
        LockedError: names the process.
    """
    try:
        file = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # there is no lock, or none that can be read
        return
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken_by(_holder(os.pread(file, _HOLDER_BYTES, 0))) from None
    except OSError:  # of a place without locks
        return
    finally:
        os.close(file)


class Lock(ABC):
    """A lock that this process holds. A process that is forked off does not."""

    note = ""
    """A remark for people on how it was taken; empty if there is none."""

    @abstractmethod
    def check(self) -> None:
        """Raises LockLostError if it was lost; asked before something is written that another run could have written too."""

    @abstractmethod
    def release(self) -> None:
        """Gives it back; a second time does nothing."""

    @abstractmethod
    def forget(self) -> None:
        """Lets go of a forked process's copy of it."""

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: set[Lock] = set()
"""The locks that this process has."""


def _forget_all() -> None:
    for lock in _held:
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)


class _FileLock(Lock):
    """By `flock`, which counts for an opened file: also twice in one process, and until the last copy of its descriptor is closed."""

    def __init__(self, folder: Path) -> None:
        self._path, self._file = folder / NAME, -1
        try:
            self._path = self._path.absolute()  # the working folder may change
            self._made = not self._path.parent.exists()
            while not self._taken():
                self._close()
        except (OSError, ValueError) as error:  # a ValueError is of a NUL in the name
            self._close()
            raise _refusal(self._path, error) from error
        except BaseException:
            self._close()
            raise

    def check(self) -> None:
        """The system keeps the file locked, but its name may be another file's by now."""
        with suppress(OSError):  # of a disk that fails, which whoever writes will find
            if not self._is_there():
                raise LockLostError(
                    f"{self._path} is gone, or is another file than this run has locked: it or its folder was removed, renamed or "
                    "replaced, and another run may be at work there. This run ends and writes nothing more there; go on from the last "
                    "checkpoint once no other does"
                )

    def _is_there(self) -> bool:
        """True as long as the file that is open has its name."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path, follow_symlinks=False))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return False
            raise

    def _taken(self) -> bool:
        """False if the file was replaced meanwhile."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not through a link, which could lead anywhere; and without waiting for the other end of a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._file = os.open(self._path, flags, 0o666)
        except FileNotFoundError:  # the folder was removed by one that had made it
            return False
        _held.add(self)
        here = os.fstat(self._file)
        if not stat.S_ISREG(here.st_mode):
            raise LockedError(f"{self._path} is no file; remove it")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken_by(_holder(os.pread(self._file, _HOLDER_BYTES, 0))) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            self.note = f"{self._path} cannot be locked ({error.strerror}): nothing keeps a second run out of this folder"
        if not self._is_there():
            return False
        if here.st_nlink > 1:
            raise LockedError(
                f"{self._path} is a hard link: its file has {here.st_nlink} names, and may be somebody else's, or the lock of a copy of "
                "this folder; remove this name"
            )
        if not _is_ours(os.pread(self._file, _HOLDER_BYTES, 0)):
            self.note = (
                self.note
                or f"{self._path} holds something that no run wrote: it stays as it is, and does not name this run"
            )
            return True
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, _written(_me()), 0)
        return True

    def release(self) -> None:
        """A folder that was made for the lock, and in which nothing was written, goes too, unless another has taken its place."""
        if self._file >= 0 and self._made:
            with suppress(OSError):  # something else is in it
                if self._is_there() and [path.name for path in self._path.parent.iterdir()] == [NAME]:
                    self._path.unlink()  # whoever has opened it meanwhile looks whether it is still there
                    self._path.parent.rmdir()
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            _held.discard(self)
            with suppress(OSError):  # of a place without locks
                fcntl.flock(
                    self._file, fcntl.LOCK_UN
                )  # a copy of the descriptor may be open in another process
            os.close(self._file)
            self._file = -1

    def forget(self) -> None:
        os.close(self._file)  # unlocking would unlock it for the holder too
        self._file = -1


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A lease that is there."""

    generation: int
    renewed: datetime
    """By the storage's clock."""
    holder: Holder | None


class _Lease(Lock):
    """An object of its own name for each folder."""

    def __init__(self, folder: AnyPath, lost: Lost) -> None:
        self._name, self._lost = f"{folder}/{NAME}", lost
        if any(isinstance(lock, _Lease) and lock._name == self._name for lock in _held):
            raise _taken_by(_me())
        bucket, _, self._object = self._name.removeprefix(SCHEME).partition("/")
        self._errors: Any = importlib.import_module("google.api_core.exceptions")
        refusals = importlib.import_module("google.auth.exceptions").GoogleAuthError
        self._retry: Any = importlib.import_module("google.cloud.storage.retry").DEFAULT_RETRY
        self._failures = (self._errors.GoogleAPIError, refusals, OSError)  # an OSError is of the network
        self._me, self._generation, self._renewed = _me(), 0, 0.0
        self._turn, self._ended, self._lost_to = threading.Lock(), threading.Event(), ""
        try:
            self._bucket = importlib.import_module("google.cloud.storage").Client().bucket(bucket)
            self._take()
        except self._failures as error:
            raise LockedError(
                f"{self._name} cannot be read and written ({error}): the bucket must exist and answer, and whoever runs this needs "
                "roles/storage.objectUser on it"
            ) from error
        _held.add(self)
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def check(self) -> None:
        """A process that was stopped for long, with its thread, asks before it goes on, for as long as another lease lasts."""
        if not self._lost_to and time.monotonic() - self._renewed <= LEASE_S:
            return
        try:
            self._renew(patience_s=LEASE_S)
        except self._failures as error:
            raise LockLostError(
                f"{self._name} was not renewed for {LEASE_S:.0f} s and cannot be now ({error}): whether another run has it cannot be "
                "asked. This run ends and writes nothing more there; go on from the last checkpoint once the bucket answers"
            ) from error

    def release(self) -> None:
        if self not in _held:
            return
        _held.discard(self)
        self._ended.set()
        with self._turn, suppress(Exception):  # it is another's by now, or expires by itself
            self._bucket.blob(self._object).delete(if_generation_match=self._generation, timeout=RENEW_S)

    def forget(self) -> None:
        """Nothing is open, and the thread is not there."""

    def _take(self) -> None:
        seen: _Found | None = None
        ahead_s = 0.0
        while True:
            found = self._found()
            if found is None:
                if self._write(0):
                    return
                continue
            if seen is None:
                seen, ahead_s = found, self._now().timestamp() - time.monotonic()
            if found.generation != seen.generation:
                raise _taken_by(found.holder)
            left_s = found.renewed.timestamp() + LEASE_S - (time.monotonic() + ahead_s)
            if left_s <= 0:
                if self._write(found.generation):
                    self.note = (
                        f"took over the lease of {found.holder or 'an unknown process'}, which has expired"
                    )
                    return
                continue
            if found is seen:
                print(
                    f"{self._name} is held by {found.holder or 'an unknown process'}: looking for up to {left_s:.0f} s whether that is alive",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(min(_LOOK_S, left_s))

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._renew()
            except LockLostError as error:
                self._lost(1, str(error))
                return
            except (
                Exception
            ):  # the storage cannot be reached: as long as nobody takes it over, it is this one's
                continue

    def _renew(self, *, patience_s: float | None = None) -> None:
        with self._turn:
            if self._ended.is_set():
                return
            retry = self._retry.with_timeout(patience_s) if patience_s else None
            if not self._lost_to and not self._write(self._generation, timeout=RENEW_S, retry=retry):
                self._lost_to = str(_holder_of(self._found()) or "an unknown process")
            if self._lost_to:
                raise LockLostError(
                    f"{self._name} was not renewed for {LEASE_S:.0f} s and is held by {self._lost_to} now. This run ends and writes "
                    "nothing more there; the other goes on from the last checkpoint"
                )

    def _write(self, generation: int, **how: Any) -> bool:
        """Writes the lease in place of that generation, 0 for none; False if another is there."""
        began = time.monotonic()
        blob = self._bucket.blob(self._object)
        try:
            blob.upload_from_string(_written(self._me), if_generation_match=generation, **how)
        except self._errors.PreconditionFailed:
            found = self._found()
            if found is None:  # it was removed by hand: nobody has it
                return bool(generation) and self._write(0, **how)
            # After a lost answer the request is sent again, and meets what it has written itself.
            if found.holder != self._me:
                return False
            self._generation = found.generation
        else:
            self._generation = int(blob.generation)
        self._renewed = began
        return True

    def _found(self) -> _Found | None:
        while True:
            blob = self._bucket.get_blob(self._object)
            if blob is None:
                return None
            if not blob.size:  # which no range is of
                return _Found(generation=int(blob.generation), renewed=blob.updated, holder=None)
            try:
                data = blob.download_as_bytes(end=_HOLDER_BYTES, if_generation_match=blob.generation)
            except (self._errors.NotFound, self._errors.PreconditionFailed):  # renewed or gone meanwhile
                continue
            return _Found(generation=int(blob.generation), renewed=blob.updated, holder=_holder(data))

    def _now(self) -> datetime:
        """The storage's time: when it says that an object was written."""
        blob = self._bucket.blob(f"{self._object}-{secrets.token_hex(4)}")
        blob.upload_from_string(b"")
        blob.delete()
        return blob.updated


def _me() -> Holder:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Holder(pid=os.getpid(), host=socket.gethostname(), since=since, key=secrets.token_hex(8))


def _written(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode() + b"\n"


def _is_ours(data: bytes) -> bool:
    """True for what a holder may have left, cut short or lost in a power cut, or what nobody misses."""
    begun = data.lstrip(b"\0")[: len(_BEGIN)]
    return _BEGIN.startswith(begun)


def _holder(data: bytes) -> Holder | None:
    """Who has written that; None if it is not whole or nobody's."""
    try:
        said = json.loads(data)
        return Holder(
            pid=int(said["pid"]), host=str(said["host"]), since=str(said["since"]), key=str(said["key"])
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _holder_of(found: _Found | None) -> Holder | None:
    return None if found is None else found.holder


def _taken_by(holder: Holder | None) -> LockedError:
    mine = holder is not None and (holder.pid, holder.host) == (os.getpid(), socket.gethostname())
    who = "this process itself" if mine else f"{holder or 'another process'}"
    return LockedError(
        f"a run is at work there, by {who}: wait for its end or stop it, or choose another folder"
    )


def _refusal(path: Path, error: OSError | ValueError) -> OSError | ValueError | LockedError:
    """The error to raise where the file cannot be made or opened; `error` itself if the disk is full or broken."""
    number, why = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return error
    if number == errno.ELOOP:
        return LockedError(f"{path} is a symbolic link, which is not followed; remove it")
    if number == errno.ENXIO:
        return LockedError(f"{path} is no file; remove it")
    if number in (errno.EMFILE, errno.ENFILE):
        return LockedError(f"{path} cannot be opened ({why}): raise the limit, as with `ulimit -n`")
    return LockedError(f"{path} cannot be written ({why}): choose a folder that can be")
