"""The other systems: each runs a tiny workload.

They need their environments: `python -m benchmarks.make_peers FOLDER`, and FOLDER in `DAPO_JAX_PEERS`.
"""

import os
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import systems
from benchmarks.gpu import write_model
from benchmarks.workload import Workload
from dapo_jax.models.presets import PRESETS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, PRESETS["tiny"])
    return folder


# Slow: needs environments of 6 GB, and loads each system. The nightly workflow makes them.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "training"), [("hf", False), ("vllm", False), ("tunix", False), ("tunix", True), ("trl", True)])  # fmt: skip
def test_a_real_peer_answers_every_call_of_the_benchmarks(model, tmp_path, name, training):
    peers = Path(os.environ.get("DAPO_JAX_PEERS") or pytest.skip("DAPO_JAX_PEERS is not set"))
    options = {"for_training": training, "rows_per_microbatch": 2}
    workload = Workload(
        model=str(model), prompts=2, samples=2, prompt_tokens=8, new_tokens=4, threads=1, options=options
    )
    worker, _ = systems.start(name, workload, Namespace(peers=peers, out=tmp_path))
    try:
        if training:
            assert worker.call("update").result == worker.call("step", seed=0).result == {}
            assert worker.call("moved").result > 0
        else:
            assert [len(row) for row in worker.call("rollout", seed=0).result] == [4] * 4
            assert [len(row) for row in worker.call("greedy").result] == [4] * 2
    finally:
        worker.close()
