"""Orbax's own words stay out of the terminal, and nobody else's do."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from dapo_jax.checkpoint_keeping import quiet_orbax

quiet_orbax()
quiet_orbax()

def call():
    error = KIND(WORDS)
    sys.excepthook(type(error), error, None)  # as C code does that prints an error

if WHERE == "thread":
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
else:
    call()
"""


@pytest.mark.parametrize(
    ("kind", "words", "where", "shown"),
    [
        ("RuntimeError", "Event loop is closed", "thread", False),
        ("RuntimeError", "Event loop is closed", "main", True),
        ("RuntimeError", "something else", "thread", True),
        ("OSError", "Event loop is closed", "thread", True),
    ],
)
def test_of_what_threads_say_only_that_the_loop_of_a_failed_save_is_closed_is_left_out(
    kind, words, where, shown
):
    program = PROGRAM.replace("KIND", kind).replace("WORDS", repr(words)).replace("WHERE", repr(where))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (f"{kind}: {words}" in done.stderr) == shown
