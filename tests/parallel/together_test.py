"""Processes wait for each other's compilations, and exchange messages of any length without new programs."""

import jax
import jax.numpy as jnp
import pytest

from dapo_jax.parallel import together
from dapo_jax.parallel.together import Together, all_gather_bytes, broadcast_from_first, by_first
from tests import several

LATE = """
import sys, time
from dapo_jax.parallel import processes
processes.start()
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dapo_jax.parallel.together import Together
seconds = float(sys.argv[1])
mesh = Mesh(np.array(jax.devices()), ("all",))
whole, spread = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("all"))
summed = jax.jit(lambda x: x.sum(), out_shardings=whole)
class Late:
    def __call__(self, x):
        return summed(x)
    def lower(self, x):
        time.sleep(seconds * jax.process_index())
        return summed.lower(x)
numbers = jax.make_array_from_callback((4,), spread, lambda cut: np.arange(4.0, dtype=np.float32)[cut])
program = Together(Late())
for _ in range(2):
    assert float(program(numbers)) == 6.0
processes.leave()
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_two_processes_whose_compilations_differ_run_together(seconds):
    """Gloo waits for half a minute: without a barrier the first process ends with an error after 60 s."""
    several.run(LATE, seconds, processes=2, devices=1, within_s=240)


def test_a_program_is_compiled_and_waited_for_once_per_shape(monkeypatch):
    met = []
    program = Together(jax.jit(lambda x: x + 1))
    monkeypatch.setattr(together, "meet", lambda: met.append(len(met)))
    monkeypatch.setattr(together.jax, "process_count", lambda: 2)
    for size in (2, 3, 2, 3):
        assert program(jnp.zeros(size)).sum() == size
    assert met == [0, 1]


UNEVEN = """
import sys
from dapo_jax.parallel import processes, together as module
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
