"""Guarantees that need a real GPU: repeated and resumed runs are equal, and a program takes the memory that was planned.

The tests of kernels and of the sampler are next to their counterparts on CPU; `-m gpu` selects all of them.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from dapo_jax.config import load_config

pytestmark = pytest.mark.gpu

OF_TESTS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT")
RUN = ["train", "quickstart", "eval.every_steps=1", "eval.prompts=8", "eval.samples_per_prompt=2"]
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 32_768, "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = """
run_dir: out
model: {{source: {folder}, compute_dtype: bfloat16, remat: full}}
data: {{max_prompt_tokens: 256}}
sampling: {{max_response_tokens: 3840, slots: 8}}
reward: {{overlong: {{buffer_tokens: 768}}}}
batch: {{prompts_per_step: 8, group_size: 4, groups_per_update: 8, rows_per_microbatch: 2}}
"""


def python(*words, **more):
    """A process with a user's environment, without the settings of the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_TESTS} | more
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def result_of(run_dir):
    """Metrics that do not depend on time or memory, and the bytes of the weights."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "speed/", "memory/")
    learnt = [{name: value for name, value in line.items() if not name.startswith(clocks)} for line in lines]
    return json.dumps(learnt, indent=1), (run_dir / "model" / "model.safetensors").read_bytes()


def test_a_repeated_and_resumed_run_equals_the_first_bit_for_bit(tmp_path):
    """Three steps in one process; two steps in a second, and the third step in another."""
    python("-m", "dapo_jax.cli", *RUN, "steps=3", f"run_dir={tmp_path / 'whole'}")
    python("-m", "dapo_jax.cli", *RUN, "steps=2", f"run_dir={tmp_path / 'parts'}")
    python("-m", "dapo_jax.cli", *RUN, "--resume", "steps=3", f"run_dir={tmp_path / 'parts'}")
    (metrics, weights), (expected, same) = result_of(tmp_path / "parts"), result_of(tmp_path / "whole")
    assert metrics == expected
    assert weights == same


def run_an_update(path):
    """Compiles the gradient of a configuration for this device with a run's settings, and runs it on zeros. Returns its memory as the device reports it."""
    from dapo_jax.parallel import gpu_settings
    from dapo_jax.plan import topologies
    from dapo_jax.plan.decoder import decoder_of
    from dapo_jax.plan.programs import Programs
    from dapo_jax.plan.workload import Assumptions, workload_of

    gpu_settings.apply()
    config, device = load_config(path), jax.devices()[0]
    programs = Programs(config, decoder_of(config.model), workload_of(config, Assumptions()), [device])
    lowered = programs.lowered()["update_add_longest"]()
    compiled = lowered.compile()
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), lowered.args_info[0])
    before = device.memory_stats()["bytes_in_use"]
    jax.block_until_ready(compiled(*zeros))
    return {"topology": topologies.here().name, "bytes": device.memory_stats()["peak_bytes_in_use"] - before}


def test_an_update_takes_the_memory_that_was_planned_without_the_device(tmp_path):
    """The plan's compiler cannot measure alternatives for a matrix product. A chosen alternative may need cuBLAS's workspace of 32 MiB.

    The plan adds cuDNN's workspace (2 sequences, 16 heads, 4,096^2 x 2 bytes) to the other temporary arrays, also if they are largest at another time."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    script = f"import json; from tests.gpu_test import run_an_update; print(json.dumps(run_an_update({str(tmp_path / 'run.yaml')!r})))"
    found = json.loads(python("-c", script).splitlines()[-1])
    planned = [
        "plan",
        tmp_path / "run.yaml",
        "--topology",
        found["topology"],
        "--only",
        "update_add_longest",
        "--json",
        "-",
    ]
    programs = json.loads(python("-m", "dapo_jax.cli", *planned))["programs"]
    [memory] = [program["memory"] for program in programs if program["name"] == "update_add_longest"]
    added = memory["outputs"] - memory["aliased"] + memory["temporaries"]
    within, workspace = 0.05 * added + 2**25, 2 * 16 * 4096**2 * 2
    assert added - workspace - within <= found["bytes"] <= added + within
