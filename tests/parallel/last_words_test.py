"""What is said of a process that has ended without a word: only then, and what was told last."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.several import ROOT

ENDING = """
import os, signal, sys, time
from dapo_jax.parallel.last_words import LastWords

index, address, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
words = LastWords(index=index, count=3, address=address)
words.tell(silent={2: 7.9} if how == "silent" else {}, way_on="Not this.")
words.tell(silent={2: 8.9} if how == "silent" else {}, way_on="Start again.")
if how == "farewell":
    words.farewell()
if how == "forked" and not os.fork():
    os.close(2)
    time.sleep(600)
if how == "mentioned":
    os.write(2, b"seen: Polled an error from coordination service\\n")
if how == "chatty" and not os.fork():
    for _ in range(40):
        os.write(2, b"chatter\\n")
        time.sleep(0.1)
    os._exit(0)
if how == "aborted":
    os.write(2, b"E1124 12:00:00.0 7 coordination_service_agent.cc:9] Polled an error from coordination service\\nF0 client.h] @ 0x7f\\n")
    time.sleep(0.3)
    os.write(2, b"@ 0x80\\n")
if how == "told":
    os.killpg(0, signal.SIGTERM)
os.kill(os.getpid(), signal.SIGKILL)
"""


def said(index, address, how):
    """What is on standard error once the process has ended, and all that write there."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ENDING, str(index), address, how],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, shown = process.communicate(timeout=60)
    finally:
        if how == "forked":
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode < 0
    return shown


@pytest.fixture
def address():
    """Where something answers."""
    with socket.create_server(("localhost", 0)) as server:
        yield f"localhost:{server.getsockname()[1]}"


@pytest.mark.parametrize("how", ["killed", "forked", "told"])
def test_a_killed_process_has_last_words(how, address):
    """Also where the end is one for the whole group, and where a forked process lives on."""
    assert said(1, address, how) == (
        "process 1 of 3 has ended without a word of its own: it was killed or it crashed; the run's other processes end too. Start again.\n"
    )


def test_who_says_itself_how_it_ends_has_none(address):
    assert said(1, address, "farewell") == ""


def test_the_process_that_is_not_heard_of_is_the_cause(address):
    cause = "process 2 has not been heard of for 9 s: it was killed, or its machine is gone"
    assert f"ended by JAX, since {cause}. Start again." in said(1, address, "silent")


def test_what_is_said_stands_before_what_jax_says_and_again_behind_it(address):
    """That JAX says it is seen as it passes by; all that is written to standard error does."""
    line = "process 1 of 3 ends: JAX ends it, for what it says below. Start again.\n"
    agent = "E1124 12:00:00.0 7 coordination_service_agent.cc:9] Polled an error from coordination service\nF0 client.h] @ 0x7f\n"
    assert said(1, address, "aborted") == f"{line}{agent}@ 0x80\n{line}"


@pytest.mark.parametrize("how", ["mentioned", "chatty"])
def test_what_others_write_is_no_end_and_does_not_hold_up_the_last_words(how, address):
    """A log that quotes JAX's words; and a process that outlives this one and writes on, all of which is passed on."""
    shown = said(1, address, how)
    last = "process 1 of 3 has ended without a word of its own: it was killed or it crashed; the run's other processes end too. Start again.\n"
    if how == "mentioned":
        assert shown == f"seen: Polled an error from coordination service\n{last}"
    else:
        before, _, after = shown.partition(last)
        assert len(before.split()) < 30 < len(before.split()) + len(after.split()) == 40


CHILD_KILLED = """
import os, subprocess, sys, time
from dapo_jax.parallel.last_words import LastWords

words = LastWords(index=1, count=3, address=sys.argv[1])
words._child.kill()
words._child.wait()
time.sleep(0.5)
subprocess.run([sys.executable, "-c", "import sys; print('from a subprocess', file=sys.stderr)"], check=True)
print("the cause of the end", file=sys.stderr)
words.tell(silent={}, way_on="Start again.")
words.farewell()
"""


def test_without_the_child_standard_error_goes_where_it_went_before(address):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD_KILLED, address],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    note, *rest = done.stderr.splitlines()
    assert note.startswith(
        "the process through which standard error went has ended (killed?); it goes directly from here on"
    )
    assert (rest, done.returncode) == (["from a subprocess", "the cause of the end"], 0)


UNREAD = """
import os, sys, time
from dapo_jax.parallel.last_words import LastWords

words = LastWords(index=1, count=3, address=sys.argv[1])
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    pass
for _ in range(2000):
    words.tell(silent={}, way_on="w" * 200)
pid = os.fork()
if not pid:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
words.farewell()
print("left", flush=True)
"""


def test_a_standard_error_that_nobody_reads_holds_up_nothing_else(address):
    """Neither news, nor a fork, nor the end: what cannot be sent is lost."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", UNREAD, address],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["7\n", "left\n"]
    finally:
        process.kill()
        process.communicate()


def test_a_first_process_that_does_not_answer_is_the_cause_for_the_others(address):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        nobody = f"localhost:{free.getsockname()[1]}"
        assert f"is gone (nothing answers at {nobody}). Start again." in said(1, nobody, "killed")
        assert "process 0 of 3 has ended without a word of its own: it was killed" in said(
            0, nobody, "killed"
        )


WATCHING = """
import os, sys
from dapo_jax.parallel.last_words import LastWords

def gone():
    print("told", flush=True)
    words.farewell(wait=False)
    os._exit(1)

words = LastWords(index=1, count=3, address=sys.argv[1], first_gone=gone)
words.tell(silent={}, way_on="Start again.")
for line in sys.stdin:
    words.others_leave()
words.farewell()
"""


@pytest.fixture
def first():
    """The first process, as far as the others see it: where it listens."""
    with socket.create_server(("localhost", 0)) as server:
        server.settimeout(30)
        yield server


@pytest.fixture
def watching(first):
    """The second process, and the connection by which it sees the first one."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WATCHING, f"localhost:{first.getsockname()[1]}"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    connection, _ = first.accept()
    connection.settimeout(30)
    yield process, connection
    process.kill()
    process.communicate()


def test_the_end_of_the_first_process_is_said_at_once_and_ends_the_others(first, watching):
    process, connection = watching
    address = f"localhost:{first.getsockname()[1]}"
    began = time.monotonic()
    first.close()
    connection.close()
    line = process.stderr.readline()
    assert time.monotonic() - began < 0.5  # JAX aborts after about a second
    assert line == (
        f"process 1 of 3 ends: process 0, through which all hear of each other, is gone (nothing answers at {address}): it was killed, or it "
        "crashed. Start again.\n"
    )
    output, more = process.communicate(timeout=30)
    assert (process.returncode, output, more) == (1, "told\n", "")


def test_a_first_process_that_leaves_in_order_is_not_missed(first, watching):
    process, connection = watching
    process.stdin.write("all are done\n")
    process.stdin.flush()
    assert connection.recv(1) == b""  # it looks no more
    first.close()
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0


def test_a_connection_that_is_closed_is_opened_again_and_no_news(first, watching):
    """JAX's service closes one on which nothing comes."""
    process, connection = watching
    time.sleep(1.1)
    connection.close()
    again, _ = first.accept()
    with again:
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0
