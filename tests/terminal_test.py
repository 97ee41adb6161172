"""Programs continue and end as usual if a standard stream is closed or missing, or if its encoding lacks a character."""

import os
import pty
import subprocess
import sys

import pytest

from dapo_jax.terminal import lasting_streams, silent_libraries, visible
from tests.several import ROOT

PYTHON = (sys.executable, "-c")

PRINTS = """
import sys, os
from dapo_jax.terminal import lasting_streams
with lasting_streams(lambda name: os.write(2, f"gone: {name}\\n".encode())):
    sys.stdin.readline()  # until the other end is closed
    for _ in range(3):
        print("x" * 10_000, flush=True)
    os.write(1, b"not through Python")
sys.exit(7)
"""

OPENS = """
import os, sys
from dapo_jax.terminal import lasting_streams
with lasting_streams():
    with open(sys.argv[1], "w") as file:
        print("printed", flush=True)
        print("complained", file=sys.stderr, flush=True)
        for number in (1, 2):
            os.write(number, b"by a library")
        assert sys.stdin.read() == ""
        assert os.get_inheritable(0) and os.get_inheritable(1) and os.get_inheritable(2)
        file.write("kept")
"""


def started(code, *arguments, **how):
    return subprocess.Popen([*PYTHON, code, *arguments], cwd=ROOT, text=True, **how)


@pytest.mark.parametrize("pair", [os.pipe, pty.openpty], ids=["reader", "terminal"])
def test_a_closed_reader_or_terminal_ends_nothing_and_is_reported_once(pair):
    """A terminal that does not control the process sends no SIGHUP; each write then fails with EIO."""
    ours, theirs = pair()
    process = started(PRINTS, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    os.close(ours)
    _, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (7, "gone: standard output\n")


def test_no_file_gets_the_number_of_a_closed_descriptor(tmp_path):
    """Otherwise the output of a library would be written into the file with number 0, 1 or 2."""
    kept = tmp_path / "kept"
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *PYTHON, OPENS, kept], cwd=ROOT, timeout=60
    )
    assert (done.returncode, kept.read_text()) == (0, "kept")


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"0.5 ? 0.1 ?"), ("utf-8", "0.5 ± 0.1 ?".encode())]
)
def test_a_character_that_cannot_be_shown_is_a_question_mark(encoding, shown):
    r"""The last one is half a surrogate pair, as half a token may be; no encoding has it."""
    code = "from dapo_jax.terminal import lasting_streams\nwith lasting_streams(): print('0.5 \\xb1 0.1 \\ud83d')"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([*PYTHON, code], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.rstrip()) == (0, shown), done.stderr


def test_a_full_disk_is_still_an_error():
    """The output is wanted there."""
    code = "from dapo_jax.terminal import lasting_streams\nwith lasting_streams(): print('x', flush=True)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PYTHON, code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode
    assert "No space left on device" in done.stderr


def test_streams_of_a_notebook_or_test_are_unchanged(capsys):
    before = (sys.stdin, sys.stdout, sys.stderr)
    with lasting_streams():
        assert (sys.stdin, sys.stdout, sys.stderr) == before
        print("here")
    assert (sys.stdin, sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "here\n"


def test_a_command_whose_reader_exits_ends_without_an_error():
    """As with `| head`; all commands have the same entry."""
    command = [sys.executable, "-m", "dapo_jax.cli", "config", "configs/quickstart.yaml"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    "text",
    [
        "\x1b]0;title\x07",
        "a\rb",
        "\x9b31m",  # CSI in one character
        "abc\u202edcba",  # the rest would run from right to left
        "a\u2028b",
        "\ud800",
        "\U000e0041",  # an invisible tag
    ],
)
def test_control_characters_and_marks_of_direction_are_written_out(text):
    assert visible(text) == text.encode("unicode_escape").decode()


@pytest.mark.parametrize("text", ["", "plain", "two\n\tlines", "é ∑ 中文 שלום", "क\u200dष", "👩\u200d🔬"])
def test_other_text_is_unchanged(text):
    assert visible(text) == text


def test_a_library_is_silent_for_a_while(capfd):
    with silent_libraries():
        os.write(2, b"lost")
    os.write(2, b"kept")
    assert capfd.readouterr().err == "kept"
