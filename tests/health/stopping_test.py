"""Signals stop a run where it may be interrupted, and end a process that does not stop."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from dapo_jax.health.stopping import STOPPED, Stop, StoppedError, first_reason, stopped_by_signals
from tests.several import ROOT


def never(status, message):
    raise AssertionError((status, message))


def test_a_signal_raises_at_once_unless_held():
    with stopped_by_signals(never) as stop, pytest.raises(StoppedError, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    assert stop.reason == "SIGTERM"


@pytest.fixture
def hangups():
    """Sets how SIGHUP is handled before the run: the tests may have been started by nohup."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_stops_the_run_and_repeated_hangups_do_not_end_it(hangups):
    """System and shell may both send SIGHUP."""
    hangups(signal.SIG_DFL)
    with stopped_by_signals(never) as stop, stop.held():
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
            time.sleep(0.1)  # for the thread that would end the process
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert stop.reason == "SIGHUP"


def test_a_second_hangup_interrupts_neither_the_stop_nor_the_shutdown():
    """The shutdown of the interpreter takes seconds once jax is loaded; the default action would end it with 129."""
    code = """
import signal, sys
from dapo_jax.health.stopping import STOPPED, StoppedError, stopped_by_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with stopped_by_signals(lambda status, message: None):
    try:
        signal.raise_signal(signal.SIGHUP)
    except StoppedError:
        signal.raise_signal(signal.SIGHUP)
        status = STOPPED
signal.raise_signal(signal.SIGHUP)
sys.exit(status)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == STOPPED


def test_hangups_stay_ignored_as_nohup_asks(hangups):
    hangups(signal.SIG_IGN)
    with stopped_by_signals(never) as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.reason


def test_a_held_signal_waits_for_a_phase_that_may_be_interrupted():
    with stopped_by_signals(never) as stop, stop.held():
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGINT"
        with pytest.raises(StoppedError), stop.abandonable():
            pytest.fail("entered after a request to stop")
        signal.raise_signal(signal.SIGUSR1)  # held again


@pytest.mark.parametrize("waiting", [True, False])
def test_waiting_for_an_item_may_be_interrupted_and_using_it_not(waiting):
    stop = Stop()

    def items():
        yield 1
        if waiting:
            stop.note("SIGTERM")
        yield 2

    with stop.held():
        watched = stop.watched(items())
        assert next(watched) == 1
        if not waiting:
            stop.note("SIGTERM")  # does not raise here
        with pytest.raises(StoppedError, match="SIGTERM"):
            next(watched)


def test_another_thread_interrupts_the_main_one_and_the_next_signal_is_the_first():
    with stopped_by_signals(never) as stop:
        threading.Timer(0.1, stop.tell, ["another process"]).start()
        with pytest.raises(StoppedError, match="another process"):
            time.sleep(20)
        with stop.held():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.2)  # for the thread that would end the process
        assert stop.reason == "another process"


def test_the_failure_of_another_process_interrupts_without_a_request_to_stop(capfd):
    with stopped_by_signals(never) as stop:
        threading.Timer(0.1, stop.fail, ["process 1 failed"]).start()
        with pytest.raises(KeyboardInterrupt, match="process 1 failed"):
            time.sleep(20)
        with stop.held():
            stop.fail("process 2 failed")
            time.sleep(0.2)  # for the thread that would print
            with pytest.raises(KeyboardInterrupt, match="process 2 failed"), stop.abandonable():
                pytest.fail("entered after another process failed")
        assert stop.reason == ""
    assert "asked to stop" not in capfd.readouterr().err


def test_former_handlers_are_restored():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with stopped_by_signals(never):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in numbers] == before
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


BUSY = """
import hashlib, sys
from dapo_jax.parallel.processes import end
from dapo_jax.health.stopping import stopped_by_signals

with stopped_by_signals(end) as stop, stop.held():
    stop.grace_s = float(sys.argv[1])
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in C, where no handler runs
"""


@pytest.mark.parametrize(
    ("grace_s", "again", "status", "message"),
    [
        (0.5, None, STOPPED, "did not stop within 0.5 s of SIGTERM"),
        (60, signal.SIGINT, 130, "a second signal (SIGINT)"),
        # `timeout` signals the process and its group at the same time.
        (2, signal.SIGTERM, STOPPED, "did not stop within 2 s of SIGTERM"),
    ],
)
def test_a_process_that_cannot_stop_is_ended(grace_s, again, status, message):
    started = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(grace_s)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert started.stdout.readline() == "ready\n"
        started.send_signal(signal.SIGTERM)
        if again is not None:
            assert "SIGTERM" in started.stderr.readline()
            started.send_signal(again)
        _, shown = started.communicate(timeout=20)
    finally:
        started.kill()
    assert started.returncode == status
    assert message in shown


@pytest.mark.parametrize(
    ("reasons", "process", "reported"),
    [
        (["", ""], 0, ""),
        (["", "SIGTERM", ""], 1, "SIGTERM"),
        (["", "SIGTERM", ""], 2, "SIGTERM (process 1)"),
        (["SIGTERM", "SIGINT"], 1, "SIGTERM (process 0)"),
        # Process 0 knows it from process 1, and process 2 does not know it yet.
        (["SIGTERM (process 1)", "SIGTERM", ""], 2, "SIGTERM (process 1)"),
    ],
)
def test_every_process_reports_which_one_was_stopped(reasons, process, reported):
    assert first_reason(dict(enumerate(reasons)), process) == reported
