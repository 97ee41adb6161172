"""One process holds the lock of a folder, others are refused, and a lock ends with its process or is lost."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from dapo_jax.storage import locks, path_of
from dapo_jax.storage.locks import LockedError, LockLostError, check_free, is_held, take
from tests.several import ROOT

HOLDING = """
import os, subprocess, sys, time
from dapo_jax.storage.locks import take
from dapo_jax.storage import path_of

def never(status, message):
    raise AssertionError(message)

lock, child = take(path_of(sys.argv[1]), lost=never), 0
if sys.argv[2] == "program":
    child = subprocess.Popen(["sleep", "600"], close_fds=False).pid
if sys.argv[2] != "fork":
    print(child, flush=True)
elif not os.fork():
    lock.release()
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def never(status, message):
    raise AssertionError((status, message))


@contextmanager
def holder(folder, child="none"):
    """Yields a process that holds the lock, and the number of its child; both are killed at the end."""
    command = [sys.executable, "-W", "ignore", "-c", HOLDING, str(folder), child]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
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
    """Returns True if the lock can be taken."""
    with take(folder, lost=never):
        return True


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    with holder(tmp_path) as (process, _):
        who = rf"process {process.pid} on {re.escape(socket.gethostname())} since \d{{4}}-"
        with pytest.raises(LockedError, match=who):
            take(tmp_path, lost=never)
        with pytest.raises(LockedError, match=who):
            check_free(tmp_path)
        assert is_held(tmp_path)
        process.kill()
        process.wait()
        check_free(tmp_path)
        assert is_held(tmp_path) is False
        assert free(tmp_path)


@pytest.mark.parametrize("child", ["fork", "program"])
def test_a_child_does_not_hold_its_parents_lock(child, tmp_path):
    with holder(tmp_path, child) as (process, started):
        with pytest.raises(LockedError):
            take(tmp_path, lost=never)
        process.kill()
        process.wait()
        os.kill(started, 0)  # the child is alive
        assert free(tmp_path)


def test_two_in_one_process_are_refused_and_one_after_the_other_are_not(tmp_path):
    folder = tmp_path / "new" / "folder"
    with take(folder, lost=never) as lock:
        with pytest.raises(LockedError, match="by this process itself"):
            take(folder, lost=never)
        lock.check()
    assert free(folder)
    lock.release()  # a second time


@pytest.mark.parametrize("left", [b"", b'{"pid": 12, "ho'])
def test_the_file_of_a_killed_holder_may_be_cut_short(left, tmp_path):
    (tmp_path / ".lock").write_bytes(left)
    with (tmp_path / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="by another process"):
            take(tmp_path, lost=never)
    with take(tmp_path, lost=never):
        assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("call", "number"), [("pwrite", errno.ENOSPC), ("open", errno.EACCES), ("flock", errno.ENOLCK)]
)
def test_a_full_disk_a_forbidden_folder_and_a_file_system_without_locks_differ(
    call, number, tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl if call == "flock" else os, call, refuse)
    if call == "flock":
        with take(tmp_path, lost=never) as lock:
            assert f"{tmp_path}/.lock cannot be locked" in lock.note
        return
    with pytest.raises(OSError if call == "pwrite" else LockedError, match=os.strerror(number)):
        take(tmp_path, lost=never)
    monkeypatch.undo()
    assert free(tmp_path)


def test_a_file_that_was_replaced_while_it_was_locked_is_not_the_lock(tmp_path, monkeypatch):
    """Otherwise one process would hold the old file and another the new one."""
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
        with pytest.raises(LockedError):
            take(tmp_path, lost=never)


@pytest.mark.parametrize("renamed", [False, True])
def test_a_lock_whose_file_has_lost_its_name_is_lost_and_its_release_leaves_the_next_holder_alone(
    renamed, tmp_path
):
    """The next run would lock another file, and two would write."""
    folder = tmp_path / "made"
    first = take(folder, lost=never)
    first.check()
    folder.rename(tmp_path / "elsewhere") if renamed else (folder / ".lock").unlink()
    with pytest.raises(LockLostError, match=rf"{folder}/\.lock was removed"):
        first.check()
    with take(folder, lost=never) as second:
        first.release()
        second.check()


def test_a_lock_stays_where_it_was_taken_when_the_working_folder_changes(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    lock = take(Path("run"), lost=never)
    monkeypatch.chdir(tmp_path / "there")
    lock.check()
    lock.release()
    assert not (tmp_path / "here" / "run").exists()


def test_a_folder_that_was_made_for_the_lock_is_removed_with_it_unless_something_was_written(tmp_path):
    there, made, written = tmp_path / "there", tmp_path / "made", tmp_path / "written"
    there.mkdir()
    for folder in (there, made, written):
        with take(folder, lost=never):
            assert (folder / locks.NAME).is_file()
            if folder == written:
                (folder / "config.yaml").touch()
    assert (there.exists(), made.exists()) == (True, False)
    assert sorted(path.name for path in written.iterdir()) == [locks.NAME, "config.yaml"]


RUN, LEASE = "gs://bucket/run", "gs://bucket/run/.lock"


@pytest.fixture
def quick(monkeypatch):
    """Short pauses between looks and between renewals; a lease lasts as long as usual."""
    monkeypatch.setattr(locks, "_LOOK_S", 0.02)
    monkeypatch.setattr(locks, "RENEW_S", 0.05)


def others(bucket, *, age_s=0.0, pid=7):
    """Stores a lease of another process that was written `age_s` ago."""
    data = json.dumps({"pid": pid, "host": "far", "since": "then", "key": "theirs"}).encode()
    generation = next(bucket.generations)
    bucket.buckets["bucket"]["run/.lock"] = (data, generation)
    bucket.written[generation] = time.time() + bucket.ahead_s - age_s


def until(happened, within_s=30):
    end = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_lease_is_taken_and_given_back_but_not_by_a_forked_child(bucket):
    with holder(RUN, "fork"):
        assert LEASE in bucket.files()
    bucket.buckets["bucket"].clear()
    for _ in range(2):
        with take(path_of(RUN), lost=never) as lock:
            assert json.loads(bucket.files()[LEASE])["pid"] == os.getpid()
            lock.check()
            assert is_held(path_of(RUN))
            assert not lock.note
        assert bucket.files("gs://bucket") == {}
        assert is_held(path_of(RUN)) is False


def test_a_lease_that_is_renewed_refuses_the_second(bucket, quick, capfd):
    with holder(RUN) as (process, _), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, path_of(RUN), lost=never)
        until(lambda: f"held by process {process.pid}" in capfd.readouterr().err)
        others(bucket)
        with pytest.raises(LockedError, match="by process 7 on far since then"):
            waiting.result(30)
    assert b"theirs" in bucket.files()[LEASE]


@pytest.mark.parametrize("age_s", [61, 59.5])
def test_a_lease_that_has_expired_by_the_storages_clock_is_taken_over(age_s, bucket, quick):
    bucket.ahead_s = 5000.0  # of this machine's clock
    others(bucket, age_s=age_s)
    with take(path_of(RUN), lost=never) as lock:
        assert lock.note == "took over the lease of process 7 on far since then, which has expired"
        assert json.loads(bucket.files()[LEASE])["pid"] == os.getpid()


def test_of_two_that_take_over_one_gets_it(bucket, quick):
    for _ in range(5):
        others(bucket, age_s=61)
        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(take, path_of(RUN), lost=never) for _ in range(2)]
        [held] = [each.result() for each in ended if each.exception() is None]
        assert [type(each.exception()) for each in ended if each.exception()] == [LockedError]
        held.release()


def test_a_lease_is_renewed_while_it_is_held_although_the_storage_is_busy_for_a_while(bucket, quick):
    with take(path_of(RUN), lost=never):
        first = bucket.buckets["bucket"]["run/.lock"][1]
        bucket.busy = 3
        until(lambda: not bucket.busy and bucket.buckets["bucket"]["run/.lock"][1] > first + 2)
        bucket.buckets["bucket"].clear()  # removed by hand
        until(lambda: LEASE in bucket.files())
    assert bucket.files("gs://bucket") == {}


def test_a_run_that_has_lost_its_lease_is_ended_and_leaves_the_other_alone(bucket, quick):
    reported = SimpleQueue()
    with take(path_of(RUN), lost=lambda *reason: reported.put(reason)) as lock:
        others(bucket, pid=8)
        status, message = reported.get(timeout=30)
        with pytest.raises(LockLostError):
            lock.check()
    assert status == 1
    assert "is now held by process 8 on far since then" in message
    assert b"theirs" in bucket.files()[LEASE]


def test_a_process_that_was_stopped_for_longer_than_a_lease_checks_before_it_writes(bucket, monkeypatch):
    with take(path_of(RUN), lost=never) as lock:
        others(bucket)
        lock.check()  # renewed a moment ago: no request
        monkeypatch.setattr(locks, "LEASE_S", -1.0)
        with pytest.raises(LockLostError, match="is now held by process 7"):
            lock.check()


def test_a_renewal_whose_answer_was_lost_finds_its_own_lease(bucket, monkeypatch):
    """The client sends it again, and meets the generation that it has written itself."""
    with take(path_of(RUN), lost=never) as lock:
        bucket.buckets["bucket"]["run/.lock"] = (bucket.files()[LEASE], next(bucket.generations))
        monkeypatch.setattr(locks, "LEASE_S", -1.0)
        lock.check()
        lock.check()
    assert bucket.files("gs://bucket") == {}


def test_a_bucket_that_refuses_the_lease_is_named_with_the_missing_role(bucket):
    with pytest.raises(LockedError, match=r"gs://nowhere/run/\.lock"):
        take(path_of("gs://nowhere/run"), lost=never)
    bucket.granted.discard("storage.objects.create")
    with pytest.raises(LockedError, match=r"gs://bucket/run/\.lock .*roles/storage.objectUser"):
        take(path_of(RUN), lost=never)


def test_a_lease_that_has_run_out_while_the_storage_does_not_answer_ends_the_run(bucket, monkeypatch):
    """Another run could have it; a short silence is tolerated."""
    with take(path_of(RUN), lost=never) as lock:
        monkeypatch.setattr(lock, "_renewed", lock._renewed - locks.LEASE_S - 1)
        bucket.busy = 1
        lock.check()
        monkeypatch.setattr(locks, "LEASE_S", -1.0)
        bucket.busy = 10**9
        with pytest.raises(LockLostError, match=r"run/\.lock was not renewed"):
            lock.check()
        bucket.busy = 0
    assert LEASE not in bucket.files()
