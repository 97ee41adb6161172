"""The installed TPU compiler accepts the flags that the launch scripts set, for a described slice."""

import os
import subprocess
import sys

import pytest

from tests.launch.clients import ASYNC_GATHERS, ROOT

pytest.importorskip("libtpu", reason="the extra tpu")

COMPILED = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.plan.topologies import devices_of, parse

mesh = make_mesh(fsdp=4, devices=devices_of(parse(sys.argv[1])))
split = NamedSharding(mesh, PartitionSpec("fsdp"))
weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=split)
text = jax.jit(lambda x, w: x @ w).lower(weight, weight).compile().as_text()
print("gathers", text.count("all-gather"))
"""


def flags_of(kind, slices="1"):
    done = subprocess.run(
        ["bash", "-c", '. launch/common.sh && libtpu_args "$@"', "-", kind, slices],
        cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def compiled(topology, flags):
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", COMPILED, topology],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow  # compiles for a TPU
@pytest.mark.parametrize(
    ("kind", "topology"), [("v6e-4", "v6e:2x2"), ("v5litepod-4", "v5e:2x2"), ("v5p-8", "v5p:2x2x1")]
)
def test_libtpu_takes_the_flags_and_no_unknown_one(kind, topology):
    flags = flags_of(kind, "2")
    assert flags.startswith(ASYNC_GATHERS)
    assert ("--xla_tpu_enable_async_collective_fusion=true" in flags) == (kind == "v5litepod-4")
    assert ("--xla_tpu_scoped_vmem_limit_kib=98304" in flags) == (kind == "v6e-4")
    done = compiled(topology, flags)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("gathers ")[1]) > 0
    assert "xla_tpu_no_such_flag" in compiled(topology, f"{flags} --xla_tpu_no_such_flag=true").stderr
