"""Messages of any length reach every process, and no length compiles a new program."""

import pytest

from dapo_jax.parallel.gather import all_gather_bytes, broadcast_from_first, by_first
from tests import several

UNEVEN = """
import sys
from dapo_jax.parallel import gather as module, processes
processes.start()
import jax
index = jax.process_index()
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **kinds: compiled.append(name) if "backend_compile" in name else None
)
for round, lengths in enumerate([(0, 5, 3), (8, 24, 25), (1000, 0, 1), (0, 0, 0)]):
    # The byte value names sender and round; 8 + 8, 8 + 24, 8 + 25 end at a buffer's edge and beyond it.
    messages = [bytes([16 * round + sender]) * length for sender, length in enumerate(lengths)]
    assert module.all_gather_bytes(messages[index], buffer_bytes=16) == messages, round
    compiled_first = len(compiled) if round == 0 else compiled_first
assert compiled_first and len(compiled) == compiled_first, compiled
assert module.broadcast_from_first(f"from {index}".encode()) == b"from 0"
processes.leave()
"""


@pytest.mark.slow
def test_messages_of_uneven_lengths_arrive_complete():
    several.run(UNEVEN, processes=3, devices=2)


def test_one_process_has_its_own_message():
    assert all_gather_bytes(b"own") == [b"own"]
    assert broadcast_from_first(b"own") == b"own"
    assert by_first(lambda: b"own") == b"own"


def test_an_error_in_by_first_is_raised_as_it_is():
    def fails():
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        by_first(fails)
