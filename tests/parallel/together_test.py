"""Processes whose compilations take differently long do not lose each other."""

import jax
import jax.numpy as jnp
import pytest

from dapo_jax.parallel import together
from dapo_jax.parallel.together import Together
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


@pytest.mark.slow
def test_two_processes_whose_compilations_differ_by_a_minute_run_together():
    """Gloo waits for half a minute: without the others' being waited for, the first process ends in an error."""
    several.run(LATE, 60, processes=2, devices=1, within_s=240)


def test_two_processes_meet_before_a_program_runs():
    several.run(LATE, 1, processes=2, devices=1)


def test_a_program_is_compiled_and_waited_for_once_for_each_shape(monkeypatch):
    met = []
    program = Together(jax.jit(lambda x: x + 1), compiled=lambda: met.append(len(met)))
    monkeypatch.setattr(together.jax, "process_count", lambda: 2)
    for size in (2, 3, 2, 3):
        assert program(jnp.zeros(size)).sum() == size
    assert met == [0, 1]


def test_one_process_waits_for_nobody():
    met = []
    assert Together(jax.jit(lambda x: x + 1), compiled=lambda: met.append(0))(jnp.zeros(2)).sum() == 2
    assert not met


ALONE = """
import sys, time
from dapo_jax.parallel import processes
processes.start()
from dapo_jax.parallel.gather import by_first
def work():
    time.sleep(float(sys.argv[1]))
    return b"done"
assert by_first(work) == b"done"
processes.leave()
"""


@pytest.mark.slow
def test_what_the_first_process_does_alone_may_take_longer_than_a_collective_waits():
    """Such as to wait for the lease on a folder, whose holder is gone, to run out."""
    several.run(ALONE, 40, processes=2, devices=1, within_s=200)
