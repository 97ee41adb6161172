"""The benchmark for a GPU, with a tiny model on the CPU."""

import json
import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.workload import Workload
from dapo_jax.models.presets import PRESETS
from dapo_jax.plan.chips import CHIPS
from tests.several import ROOT


def results_of(folder, *more):
    """Runs the command without peers, and returns the results that it wrote."""
    words = "--size tiny --rollout 2,4,8,8 2,8,8,8 --update 2,4,8,8 --rows-per-microbatch 4 --rounds 2 --platforms cpu --card h100"
    command = [sys.executable, "-m", "benchmarks.gpu", *words.split(), "--peers", folder / "none", "--out", folder, *more]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "vllm is left out" in done.stdout
    assert "trl is left out" in done.stdout
    return json.loads((folder / "gpu.json").read_text())["results"]


# Slow: compiles decoding and an update in other processes. The tests above run the command without our system.
@pytest.mark.slow
def test_one_command_measures_our_system_with_both_kinds_of_flags(tmp_path):
    found = results_of(tmp_path)
    sizes = ("rollout 2x4x8x8", "rollout 2x8x8x8", "update 2x4x8x8")
    assert set(found) == {f"{size}:ours{timed}" for size in sizes for timed in ("", " timed")}
    for result in found.values():
        assert len(result["seconds"]) == len(result["share"]) == 2
        assert all(0 < share < 1 for share in result["share"])


def test_the_least_time_of_qwen3_by_hand():
    """Qwen3-0.6B has 440,401,920 weights in layers and 155,582,464 in the unembedding. A cached token has 28 x 8 x 128 x 2 x 2 bytes."""
    decoder, chip = PRESETS["qwen3-0.6b"], CHIPS["h100"]
    matrices, ends, token = 440_401_920, 155_582_464, 114_688
    rollout = Workload(model="", prompts=2, samples=3, prompt_tokens=10, new_tokens=5)
    # Six responses; their five steps read 10, 11, 12, 13 and 14 tokens each.
    bytes_read = 5 * 2 * (matrices + ends) + 6 * 60 * token
    assert gpu.least_seconds("rollout", rollout, decoder, chip) == pytest.approx(
        bytes_read / chip.device_hbm_bytes_s
    )
    # Tokens: 2 x 10 + 6 x 5. Pairs: 2 x (1 + ... + 10) + 6 x (11 + ... + 15). A pair takes 4 x 28 x 16 x 128 operations.
    flops = 3 * (2 * matrices * 50 + 4 * 28 * 16 * 128 * (2 * 55 + 6 * 65) + 2 * ends * 30)
    assert gpu.least_seconds("update", rollout, decoder, chip) == pytest.approx(flops / chip.peak_flops)
