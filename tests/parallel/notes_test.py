"""Notes arrive without a collective, also from a thread, and are taken once."""

from dapo_jax.parallel.notes import leave_note, take_notes
from tests import several

NOTES = """
from concurrent.futures import ThreadPoolExecutor
from dapo_jax.parallel import processes
processes.start()
import jax
from dapo_jax.parallel.notes import leave_note, take_notes
from dapo_jax.parallel.together import meet
index = jax.process_index()
with ThreadPoolExecutor(1) as thread:
    for step in range(2):
        # Names as paths in a bucket are, and one that begins as another does.
        leave_note(f"gs://bucket/{step}", "replaced")
        thread.submit(leave_note, f"gs://bucket/{step}", f"{step} of {index}").result()
        leave_note(f"gs://bucket/{step}0", "another subject")
        meet()
        if index == 0:
            assert take_notes(f"gs://bucket/{step}") == {0: f"{step} of 0", 1: f"{step} of 1"}
            assert take_notes(f"gs://bucket/{step}") == {}
            assert len(take_notes(f"gs://bucket/{step}0")) == 2
        meet()
    if index == 1:
        leave_note("of one", "x" * 1_000_000)
    meet()
    assert index == 1 or take_notes("of one") == {1: "x" * 1_000_000}
    meet()
processes.leave()
"""


def test_notes_of_all_are_taken_once_by_their_subject():
    several.run(NOTES, processes=2, devices=1)


def test_a_process_that_is_alone_has_nobody_to_leave_a_note_for():
    leave_note("subject", "text")
    assert take_notes("subject") == {}
