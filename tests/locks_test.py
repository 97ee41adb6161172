"""Who has a folder's lock, who is refused, and what becomes of the lock of one that is gone."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dapo_jax import locks
from dapo_jax.locks import LockedError, LockLostError, take
from dapo_jax.storage import path_of
from tests.several import ROOT

HOLDING = """
import os, subprocess, sys, time
from pathlib import Path
from dapo_jax.locks import take

def never(status, message):
    raise AssertionError(message)

lock, child = take(Path(sys.argv[1]), lost=never), 0
if sys.argv[2] == "program":
    child = subprocess.Popen(["sleep", "600"], close_fds=False).pid
if sys.argv[2] != "fork":
    print(child, flush=True)
elif not os.fork():
    print(os.getpid(), flush=True)
time.sleep(600)
"""
"""A fork says its number itself: before it has run at all it cannot have let go of anything."""


def never(status, message):
    raise AssertionError((status, message))


@contextmanager
def holder(folder, child="none"):
    """A process that holds the lock, and the number of the child that it has started; both end with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(folder), child], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    started = 0
    try:
        started = int(process.stdout.readline())
        yield process, started
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if started:
            os.kill(started, signal.SIGKILL)


def free(folder):
    """True if the lock can be had at once."""
    with take(folder, lost=never):
        return True


def test_a_second_process_is_told_who_holds_the_lock_since_when(tmp_path):
    with holder(tmp_path) as (process, _):
        who = rf"process {process.pid} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d .* UTC"
        with pytest.raises(
            LockedError, match=rf"{who}: wait for its end or stop it, or choose another folder"
        ):
            take(tmp_path, lost=never)


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    with holder(tmp_path) as (process, _):
        process.kill()
        process.wait()
        assert free(tmp_path)


@pytest.mark.parametrize("child", ["fork", "program"])
def test_a_child_does_not_hold_its_parents_lock(child, tmp_path):
    with holder(tmp_path, child) as (process, started):
        with pytest.raises(LockedError):
            take(tmp_path, lost=never)
        process.kill()
        process.wait()
        os.kill(started, 0)  # it is still there
        assert free(tmp_path)


def test_two_in_one_process_are_refused_and_one_after_the_other_are_not(tmp_path):
    folder = tmp_path / "new" / "folder"
    with take(folder, lost=never) as lock:
        with pytest.raises(LockedError, match="by this process itself"):
            take(folder, lost=never)
        lock.check()
    assert free(folder)
    lock.release()  # a second time
    assert not folder.exists()


def test_what_an_earlier_holder_wrote_may_be_anything(tmp_path):
    for left in (b"", b"{", b"[]", b'{"pid": "x"}', b'{"pid": Infinity}', b"\xff" * 5000, b"[" * 5000):
        (tmp_path / ".lock").write_bytes(left)
        assert free(tmp_path)
    with (tmp_path / ".lock").open("wb") as file:
        file.write(b'{"pid": 1, "host": "\\u001b[31mx", "since": "now", "key": ""}')
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=r"by process 1 on \\x1b\[31mx since now: wait"):
            take(tmp_path, lost=never)
        file.truncate(0)
        with pytest.raises(LockedError, match="by another process: wait"):
            take(tmp_path, lost=never)


def test_what_is_no_file_is_not_followed_and_not_opened_for_ever(tmp_path):
    target = tmp_path / "target"
    places = {name: tmp_path / name / ".lock" for name in ("link", "dangling", "pipe", "folder")}
    for place in places.values():
        place.parent.mkdir()
    target.write_text("mine")
    places["link"].symlink_to(target)
    places["dangling"].symlink_to(tmp_path / "made")
    os.mkfifo(places["pipe"])
    places["folder"].mkdir()
    for name, message in (
        ("link", r"link/\.lock is a symbolic link, which is not followed; remove it"),
        ("dangling", "is a symbolic link"),
        ("pipe", r"pipe/\.lock is no file; remove it"),
        ("folder", r"folder/\.lock cannot be written \(Is a directory\)"),
    ):
        with pytest.raises(LockedError, match=message):
            take(places[name].parent, lost=never)
    assert target.read_text() == "mine"
    assert not (tmp_path / "made").exists()
    with pytest.raises(LockedError, match=r"target/run/\.lock cannot be written \(Not a directory\)"):
        take(target / "run", lost=never)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_is_only_read_is_said(number, tmp_path, monkeypatch):
    """As the system answers; whoever runs the tests may be allowed everything."""

    def refuse(path, *how):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        LockedError, match=rf"cannot be written \({os.strerror(number)}\): choose a folder that can be"
    ):
        take(tmp_path, lost=never)


def test_a_full_disk_is_no_lock(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space left"):
        take(tmp_path, lost=never)
    monkeypatch.undo()
    assert free(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_and_the_run_goes_on(number, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with take(tmp_path, lost=never) as lock:
        assert "nothing keeps a second run out of this folder" in lock.note


def test_a_file_that_was_replaced_while_it_was_locked_is_not_the_lock(tmp_path, monkeypatch):
    """Otherwise one would hold the old file and another the new one."""
    flock, left = fcntl.flock, [1, 2]

    def replaced(file, how):
        flock(file, how)
        if how & fcntl.LOCK_EX and left:
            (tmp_path / ".lock").unlink()
            if left.pop() == 2:
                (tmp_path / ".lock").touch()

    monkeypatch.setattr(fcntl, "flock", replaced)
    with take(tmp_path, lost=never):
        assert not left
        assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()
        with pytest.raises(LockedError):
            take(tmp_path, lost=never)


DEEDS = {
    "removed": lambda folder: (folder / ".lock").unlink(),
    "replaced": lambda folder: ((folder / ".lock").unlink(), (folder / ".lock").touch()),
    "its folder renamed": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "its folder a file": lambda folder: (folder.rename(folder.with_name("elsewhere")), folder.touch()),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_lock_whose_file_has_lost_its_name_is_lost(deed, tmp_path):
    """Whoever comes next would get another file's lock, and two would write."""
    folder = tmp_path / "run"
    folder.mkdir()
    with take(folder, lost=never) as lock:
        lock.check()
        DEEDS[deed](folder)
        with pytest.raises(LockLostError, match=rf"{folder}/\.lock is gone, or .* This run ends"):
            lock.check()


def test_whoever_gives_a_lost_lock_back_leaves_the_next_holder_alone(tmp_path):
    folder = tmp_path / "made"
    first = take(folder, lost=never)
    (folder / ".lock").unlink()
    folder.rmdir()
    with take(folder, lost=never) as second:
        first.release()
        second.check()
        with pytest.raises(LockedError, match="by this process itself"):
            take(folder, lost=never)


def test_a_lock_stays_where_it_was_taken_when_the_working_folder_changes(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    lock = take(Path("run"), lost=never)
    with take(tmp_path / "there" / "run", lost=never) as other:
        monkeypatch.chdir(tmp_path / "there")
        lock.check()
        lock.release()
        other.check()
        assert not (tmp_path / "here" / "run").exists()


def test_a_file_of_somebody_else_is_locked_and_not_written_over(tmp_path):
    for mine in (b"a file of mine", b"[1, 2]", b"{}"):
        (tmp_path / ".lock").write_bytes(mine)
        with take(tmp_path, lost=never) as lock:
            assert "holds something that no run wrote: it stays as it is" in lock.note
            with pytest.raises(LockedError, match="by another process"):
                take(tmp_path, lost=never)
        assert (tmp_path / ".lock").read_bytes() == mine


@pytest.mark.parametrize("left", [b"", b"{", b'{"pid": 12, "ho', b'{"pid": 12}\n', b"\0" * 99])
def test_a_file_that_a_holder_left_whole_or_not_names_the_next_one(left, tmp_path):
    """Cut short by a kill, or lost in a power cut."""
    (tmp_path / ".lock").write_bytes(left)
    with take(tmp_path, lost=never) as lock:
        assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()
        assert not lock.note


def test_a_hard_link_is_not_written_through(tmp_path):
    """It may be somebody's file, or the lock of a folder that was copied with links."""
    for number, content in enumerate((b"thesis", b"")):
        kept, folder = tmp_path / f"kept{number}", tmp_path / str(number)
        kept.write_bytes(content)
        folder.mkdir()
        (folder / ".lock").hardlink_to(kept)
        with pytest.raises(
            LockedError, match=r"\.lock is a hard link: its file has 2 names.*remove this name"
        ):
            take(folder, lost=never)
        assert kept.read_bytes() == content


def test_a_socket_or_a_name_that_cannot_be_is_said_with_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(".lock")
    for folder, message in (
        (tmp_path, r"/\.lock is no file; remove it"),
        (tmp_path / ("x" * 300), r"x/\.lock cannot be written \(File name too long\): choose a folder"),
        (
            Path(f"{tmp_path}/a\0b"),
            r"b/\.lock cannot be written \((mkdir: )?embedded null \w+( in path)?\): choose a folder",
        ),
    ):
        with pytest.raises(LockedError, match=message):
            take(folder, lost=never)


def test_a_process_without_descriptors_is_told_to_raise_the_limit(tmp_path, monkeypatch):
    def refuse(path, *how):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        LockedError, match=r"\.lock cannot be opened \(Too many open files\): raise the limit"
    ):
        take(tmp_path, lost=never)


def test_a_folder_below_one_that_cannot_be_searched_is_said(tmp_path, monkeypatch):
    """The system's answer is made up: whoever runs the tests may be allowed everything."""
    folder, look = tmp_path / "closed" / "run", os.stat

    def refuse(path, *how, **more):
        if str(path).startswith(str(folder)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, *how, **more)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(LockedError, match=r"run/\.lock cannot be written \(Permission denied\)"):
        take(folder, lost=never)


RUN, LEASE = "gs://bucket/run", "gs://bucket/run/.lock"


@pytest.fixture
def quick(monkeypatch):
    """Looks and renews often; a lease lasts as long as it does."""
    monkeypatch.setattr(locks, "_LOOK_S", 0.02)
    monkeypatch.setattr(locks, "RENEW_S", 0.05)


def others(bucket, *, age_s=0.0, pid=7):
    """Puts a lease of another process there, written so long ago."""
    data = json.dumps({"pid": pid, "host": "far", "since": "then", "key": "theirs"}).encode()
    generation = next(bucket.generations)
    bucket.buckets["bucket"]["run/.lock"] = (data, generation)
    bucket.written[generation] = time.time() + bucket.ahead_s - age_s


def until(happened, within_s=30):
    end = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_lease_is_taken_and_given_back(bucket):
    with take(path_of(RUN), lost=never) as lock:
        assert json.loads(bucket.files()[LEASE])["pid"] == os.getpid()
        with pytest.raises(LockedError, match="by this process itself"):
            take(path_of(RUN), lost=never)
        lock.check()
    assert LEASE not in bucket.files()
    with take(path_of(RUN), lost=never) as lock:
        assert not lock.note
    assert bucket.files("gs://bucket") == {}


def test_a_lease_that_is_renewed_refuses_the_second(bucket, quick, capfd):
    others(bucket)
    before = len(bucket.requests)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, path_of(RUN), lost=never)
        until(lambda: any(method == "DELETE" for method, *_ in bucket.requests[before:]))  # it has the time
        others(bucket)
        with pytest.raises(LockedError, match="by process 7 on far since then: wait for its end"):
            waiting.result(30)
    assert "is held by process 7 on far since then: looking for up to 60 s" in capfd.readouterr().err
    assert set(bucket.files("gs://bucket")) == {LEASE}
    assert b"theirs" in bucket.files()[LEASE]


def test_a_lease_that_has_expired_by_the_storages_clock_is_taken_over_at_once(bucket):
    bucket.ahead_s = 5000.0  # of this machine's clock
    others(bucket, age_s=61)
    with take(path_of(RUN), lost=never) as lock:
        assert lock.note == "took over the lease of process 7 on far since then, which has expired"
        assert json.loads(bucket.files()[LEASE])["pid"] == os.getpid()


def test_a_lease_that_is_not_renewed_expires_while_it_is_waited_for(bucket, quick):
    others(bucket, age_s=59.5)
    with take(path_of(RUN), lost=never) as lock:
        assert "which has expired" in lock.note


def test_of_two_that_take_over_one_gets_it(bucket, quick):
    for _ in range(5):
        others(bucket, age_s=61)
        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(take, path_of(RUN), lost=never) for _ in range(2)]
        [held] = [each.result() for each in ended if each.exception() is None]
        assert [type(each.exception()) for each in ended if each.exception()] == [LockedError]
        held.release()


def test_a_lease_is_renewed_as_long_as_it_is_held_although_the_storage_is_busy_for_a_while(bucket, quick):
    with take(path_of(RUN), lost=never):
        first = bucket.buckets["bucket"]["run/.lock"][1]
        bucket.busy = 3
        until(lambda: not bucket.busy and bucket.buckets["bucket"]["run/.lock"][1] > first + 2)
        bucket.buckets["bucket"].clear()  # removed by hand: nobody else's
        until(lambda: LEASE in bucket.files())
    assert bucket.files("gs://bucket") == {}


def test_whoever_has_lost_its_lease_is_ended_and_leaves_the_others_alone(bucket, quick):
    said, called = [], threading.Event()

    def lost(status, message):
        said.append((status, message))
        called.set()

    with take(path_of(RUN), lost=lost) as lock:
        others(bucket, pid=8)
        assert called.wait(30)
        with pytest.raises(LockLostError):
            lock.check()
    [(status, message)] = said
    assert status == 1
    assert (
        "is held by process 8 on far since then now. This run ends and writes nothing more there" in message
    )
    assert b"theirs" in bucket.files()[LEASE]


def test_who_was_stopped_for_longer_than_a_lease_asks_before_it_writes(bucket, monkeypatch):
    """Its thread has had no time yet."""
    with take(path_of(RUN), lost=never) as lock:
        others(bucket)
        lock.check()  # renewed a moment ago: not asked again
        monkeypatch.setattr(locks, "LEASE_S", -1.0)
        with pytest.raises(LockLostError, match="is held by process 7"):
            lock.check()


def test_a_renewal_whose_answer_was_lost_finds_its_own_lease(bucket, monkeypatch):
    """Sent again, it meets a generation that it does not know, and its own key there."""
    with take(path_of(RUN), lost=never) as lock:
        bucket.buckets["bucket"]["run/.lock"] = (bucket.files()[LEASE], next(bucket.generations))
        monkeypatch.setattr(locks, "LEASE_S", -1.0)
        lock.check()
        lock.check()
    assert bucket.files("gs://bucket") == {}


def test_an_expired_lease_that_is_empty_is_taken_over(bucket):
    others(bucket, age_s=61)
    _, generation = bucket.buckets["bucket"]["run/.lock"]
    bucket.buckets["bucket"]["run/.lock"] = (b"", generation)
    with take(path_of(RUN), lost=never) as lock:
        assert lock.note == "took over the lease of an unknown process, which has expired"


def test_a_bucket_that_refuses_the_lease_is_said_with_what_is_needed(bucket):
    with pytest.raises(LockedError, match=r"gs://nowhere/run/\.lock .*: the bucket must exist"):
        take(path_of("gs://nowhere/run"), lost=never)
    bucket.granted.discard("storage.objects.create")
    with pytest.raises(LockedError, match=r"gs://bucket/run/\.lock .*needs roles/storage.objectUser on it"):
        take(path_of(RUN), lost=never)


def test_a_lease_that_has_run_out_while_the_storage_does_not_answer_ends_the_run(bucket, monkeypatch):
    """Another could have it, and nothing can be written there anyway; a short silence is waited for."""
    with take(path_of(RUN), lost=never) as lock:
        monkeypatch.setattr(lock, "_renewed", lock._renewed - locks.LEASE_S - 1)
        bucket.busy = 1
        lock.check()
        monkeypatch.setattr(locks, "LEASE_S", -1.0)
        bucket.busy = 10**9
        with pytest.raises(
            LockLostError, match=r"run/\.lock was not renewed .* and cannot be now .*This run ends"
        ):
            lock.check()
        bucket.busy = 0
    assert LEASE not in bucket.files()


FORKED = """
import os, sys
from dapo_jax.locks import take
from dapo_jax.storage import path_of

def never(status, message):
    raise AssertionError(message)

with take(path_of("gs://bucket/run"), lost=never) as lock:
    child = os.fork()
    if not child:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_forked_child_does_not_give_its_parents_lease_back(bucket):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    assert LEASE in bucket.files()
    process.communicate("")
    assert process.returncode == 0
    assert LEASE not in bucket.files()


def test_a_folder_that_was_made_for_the_lock_goes_with_it_unless_something_was_written(tmp_path):
    """A start that is refused leaves nothing; what was there before stays."""
    there, made, written = tmp_path / "there", tmp_path / "made", tmp_path / "written"
    there.mkdir()
    for folder in (there, made, written):
        with locks.take(folder, lost=never):
            assert (folder / locks.NAME).is_file()
            if folder == written:
                (folder / "config.yaml").touch()
    assert (there.exists(), made.exists()) == (True, False)
    assert sorted(path.name for path in written.iterdir()) == [locks.NAME, "config.yaml"]
    locks.take(made, lost=never).release()


def test_a_lock_that_was_removed_while_one_waited_for_it_is_made_anew(tmp_path, monkeypatch):
    """Between opening the file and locking it the holder may leave, and take the file and the folder along."""
    folder = tmp_path / "made"
    first = locks.take(folder, lost=never)
    flock = fcntl.flock

    def late(file, how):
        if first._file >= 0 and how & fcntl.LOCK_EX:
            first.release()
        return flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locks.take(folder, lost=never) as second:
        assert os.path.samestat(os.fstat(second._file), os.stat(folder / locks.NAME))
