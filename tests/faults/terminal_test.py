"""A run whose terminal is closed, or whose output is no longer read."""

import fcntl
import os
import pty
import subprocess
import termios
import time

import pytest

from dapo_jax.health.stopping import STOPPED
from tests.faults.micro import make_run

IN_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# It is inherited: libtpu, which other tests load, has hangups ignored in the process that starts this one.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from dapo_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""


# Slow: a whole process. tests/terminal_test.py closes the readers of a process that only prints.
@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_it(tmp_path):
    run = make_run(tmp_path, steps=2, eval_every=2)
    process = run.start(stderr=subprocess.PIPE)
    process.stdout.close()  # as `head` does once it has its lines
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert errors.startswith("dapo-jax train: standard output has no reader")
    assert errors.count("\n") == 1
    assert run.steps() == [1, 2]
    assert (run.run_dir / "model" / "model.safetensors").exists()


# Slow: a whole process of up to 40 steps. tests/health/stopping_test.py stops at hangups, also repeated.
@pytest.mark.slow
def test_a_terminal_that_is_closed_stops_it(tmp_path):
    """While the live view is shown. The system signals the processes of the session, and each later write fails."""
    run = make_run(tmp_path, steps=40)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x28\0\x78\0\0\0\0\0")  # 40 lines of 120 columns
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = run.start(program=("-c", IN_A_TERMINAL), start_new_session=True, **streams)
    os.close(theirs)
    try:
        shown = b""
        while not run.steps():
            assert process.poll() is None, shown
            shown += _read(ours)
        assert b"\x1b[" in shown, "the live view"
        os.close(ours)
        status = process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert status == STOPPED
    assert 0 < max(run.steps()) < 40


def _read(descriptor):
    """Reads the output of the terminal, since the process would wait for a reader."""
    os.set_blocking(descriptor, False)
    time.sleep(0.02)
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""
