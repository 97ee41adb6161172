"""A run whose terminal is closed, does not know a character, or was never there; and one whose output nobody reads."""

import fcntl
import os
import pty
import subprocess
import sys
import termios
import time

import pytest

from dapo_jax.health.stopping import STOPPED
from tests.faults.micro import assert_the_same_run, make_run
from tests.several import ROOT

ENVIRONMENT = {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TERM": "xterm"}


ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

IN_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# It is inherited: libtpu, which other tests load, has hangups ignored in the process that starts this one.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
from dapo_jax.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def ascii_only(tmp_path_factory):
    """(run, what it printed) of a run with an evaluation whose terminal knows only ASCII."""
    run = make_run(tmp_path_factory.mktemp("ascii"), steps=2, eval_every=2)
    process = started(run, environment=ASCII, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    return run, shown


def started(run, *options, before=(), program=("-m", "dapo_jax.cli"), environment=(), **how):
    command = [*before, sys.executable, *program, "train", str(run.config), *options]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT | dict(environment), **how)


def test_a_terminal_that_knows_only_ascii_shows_question_marks(ascii_only):
    shown = ascii_only[1].splitlines()
    [line] = [line for line in shown if line.startswith(b"eval ") and b"(step 2)" in line]
    assert b" ? " in line, "the standard error stands behind a sign that ASCII does not have"


def test_a_reader_that_leaves_does_not_end_it(ascii_only, tmp_path):
    whole, _ = ascii_only
    run = make_run(tmp_path, steps=2, eval_every=2)
    process = started(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # as `head` does once it has its lines
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert said.startswith("dapo-jax train: standard output has no reader")
    assert said.count("\n") == 1
    assert_the_same_run(run.run_dir, whole.run_dir)


@pytest.mark.slow  # a whole process; terminal_test has the streams of commands
def test_what_a_library_says_without_standard_streams_is_in_no_file_of_the_run(ascii_only, tmp_path):
    """The next to be opened would have their numbers: of the pair by which signals are heard of, a line's end would be SIGUSR1."""
    whole, _ = ascii_only
    run = make_run(tmp_path, steps=2, eval_every=2)
    grader = (tmp_path / "grader.py").read_text()
    library = 'for number in (1, 2): os.write(number, b"a warning\\n")'
    (tmp_path / "grader.py").write_text(
        "import os\n" + grader.replace("    waiting =", f"    {library}\n    waiting =")
    )
    closed = ["bash", "-c", 'exec "$@" >&- 2>&-', "bash"]
    process = started(run, "checkpoint.grace_s=1", before=closed)
    try:
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()
    assert_the_same_run(run.run_dir, whole.run_dir)


@pytest.mark.parametrize(
    ("hangups", "steps"), [("stop", 40), pytest.param("nohup", 12, marks=pytest.mark.slow)]
)
def test_a_terminal_that_is_closed_stops_it_unless_hangups_are_ignored(hangups, steps, ascii_only, tmp_path):
    """While the live view draws in it. The system tells the session's processes, and each write fails from there on."""
    run = make_run(tmp_path, steps=steps)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x28\0\x78\0\0\0\0\0")  # 40 lines of 120 columns
    program = ("-c", IN_A_TERMINAL, hangups)
    process = started(
        run, program=program, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
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
    if hangups == "nohup":
        assert (status, max(run.steps())) == (0, steps)
    else:
        assert status == STOPPED
        assert 0 < max(run.steps()) < steps


def _read(descriptor):
    """What the terminal shows now; the process would wait for a reader."""
    os.set_blocking(descriptor, False)
    time.sleep(0.02)
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""
