"""Processes whose compilations take different times wait for each other."""

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
    """Slow: Gloo waits for half a minute, so without a barrier the first process ends with an error."""
    several.run(LATE, 60, processes=2, devices=1, within_s=240)


def test_two_processes_meet_before_a_program_runs():
    several.run(LATE, 1, processes=2, devices=1)


def test_a_program_is_compiled_and_waited_for_once_per_shape(monkeypatch):
    met = []
    program = Together(jax.jit(lambda x: x + 1), compiled=lambda: met.append(len(met)))
    monkeypatch.setattr(together.jax, "process_count", lambda: 2)
    for size in (2, 3, 2, 3):
        assert program(jnp.zeros(size)).sum() == size
    assert met == [0, 1]


def test_one_process_does_not_wait():
    met = []
    assert Together(jax.jit(lambda x: x + 1), compiled=lambda: met.append(0))(jnp.zeros(2)).sum() == 2
    assert not met
