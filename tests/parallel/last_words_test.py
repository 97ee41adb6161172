"""What is said of a process that has ended without a word: only then, and what was told last."""

import os
import signal
import socket
import subprocess
import sys

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
        "process 1 of 3 has ended without a word of its own: killed, or it crashed; the others end for want of it. Start again.\n"
    )


def test_who_says_itself_how_it_ends_has_none(address):
    assert said(1, address, "farewell") == ""


def test_the_process_that_is_not_heard_of_is_the_cause(address):
    assert "ended by JAX, since process 2 has not been heard of for 9 s. Start again." in said(
        1, address, "silent"
    )


def test_a_first_process_that_does_not_answer_is_the_cause_for_the_others(address):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        nobody = f"localhost:{free.getsockname()[1]}"
        assert f"is gone (nothing answers at {nobody}). Start again." in said(1, nobody, "killed")
        assert "process 0 of 3 has ended without a word of its own: killed" in said(0, nobody, "killed")
