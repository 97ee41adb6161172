"""The other systems: each runs a tiny workload, and a system that fails leaves the figures of the others.

Tests of real systems need their environments: `python -m benchmarks.make_peers FOLDER`, and FOLDER in `DAPO_JAX_PEERS`.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import systems
from benchmarks.gpu import write_model
from benchmarks.workload import Workload
from dapo_jax.models.presets import PRESETS
from tests.several import ROOT

SIZES = ("--prompts", "2", "--samples", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--rounds", "2", "--warmups", "1")  # fmt: skip
STUB = """
import json, sys
workload = json.loads(sys.argv[4])
row = list(range(workload["new_tokens"]))
replies = {
    "greedy": [row] * workload["prompts"], "rollout": [row] * workload["prompts"] * workload["samples"],
    "score": -1.0, "update": {}, "moved": 0.5,
}
print(json.dumps({"seconds": 1.0, "result": "stub 1"}), flush=True)
for number, line in enumerate(sys.stdin):
    call = json.loads(line)["call"]
    failed = call == FAILS and number >= AFTER
    print(json.dumps({"error": "KeyError: it"} if failed else {"seconds": 2.0, "result": replies[call]}), flush=True)
"""
"""A worker with the protocol of `benchmarks.worker`, which fails in the call FAILS from request AFTER on."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, PRESETS["tiny"])
    return folder


def stub(peers: Path, name: str, fails: str = "", after: int = 0) -> None:
    """Writes an environment whose interpreter runs the stub."""
    python = peers / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    code = STUB.replace("FAILS", repr(fails)).replace("AFTER", str(after))
    python.write_text(f"#!{sys.executable}\n{code}")
    python.chmod(0o755)


def measured(benchmark: str, model: Path, folder: Path, *names: str) -> dict:
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", model, "--peers", folder / "peers", "--out", folder, *SIZES, "--threads", "1"]  # fmt: skip
    more = ("--dtypes", "float32") if benchmark == "rollout" else ()
    subprocess.run([*command, *more, "--systems", *names], cwd=ROOT, check=True, capture_output=True)
    return json.loads((folder / f"{benchmark}.json").read_text())


# The stub answers, in this order: warm-up, greedy (and scores for the reference), round 0, round 1.
@pytest.mark.parametrize(("fails", "after", "rounds"), [("greedy", 1, 0), ("rollout", 3, 1)])
def test_rollouts_of_the_others_are_kept_when_one_sampler_fails(model, tmp_path, fails, after, rounds):
    stub(tmp_path / "peers", "vllm")
    stub(tmp_path / "peers", "tunix", fails, after)
    found = measured("rollout", model, tmp_path, "tunix", "vllm")
    assert set(found["failed"]) == {"tunix:float32"}
    assert "KeyError" in found["failed"]["tunix:float32"]
    assert found["systems"]["vllm:float32"]["seconds"] == [2.0, 2.0]
    assert found["systems"]["vllm:float32"]["greedy_equal_tokens"] == [4, 4]
    assert len(found["systems"]["tunix:float32"]["seconds"]) == rounds


def test_updates_of_the_others_are_kept_when_one_trainer_does_not_load(model, tmp_path):
    stub(tmp_path / "peers", "trl")
    stub(tmp_path / "peers", "tunix")
    (tmp_path / "peers" / "tunix" / "bin" / "python").write_text(
        f"#!{sys.executable}\nraise AttributeError\n"
    )
    found = measured("update", model, tmp_path, "tunix", "trl")
    assert set(found["failed"]) == {"tunix"}
    assert found["systems"]["trl"]["seconds"] == [2.0, 2.0]
    assert found["systems"]["trl"]["moved"] == 0.5


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
