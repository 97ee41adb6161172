"""SmolLM2-135M in bfloat16: how far what samples is from what trains. Only where DAPO_JAX_SMOLLM2 names a folder of it."""

import os

import jax
import pytest

from dapo_jax.config import (
    BatchConfig,
    DataConfig,
    DynamicSamplingConfig,
    ModelConfig,
    OverlongConfig,
    RewardConfig,
    SamplingConfig,
    TrainConfig,
)
from dapo_jax.dapo import precision
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run import train

SMOLLM2 = os.environ.get("DAPO_JAX_SMOLLM2")
STARTS = ("The capital of France is", "Once upon a time, in a village", "def fibonacci(n):\n", "12 + 7 =")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SMOLLM2, reason="DAPO_JAX_SMOLLM2 names no folder of SmolLM2-135M-Instruct"),
]


def step(run_dir, monkeypatch):
    """The metrics of one step on 64 responses of up to 48 tokens, more than 2,000 in all."""
    one = make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr("dapo_jax.run.build.mesh_of", lambda axes, **how: one)
    config = TrainConfig(
        run_dir=str(run_dir),
        steps=1,
        model=ModelConfig(source=SMOLLM2, compute_dtype="bfloat16", remat="dots"),
        data=DataConfig(max_prompt_tokens=16),
        sampling=SamplingConfig(slots=64, max_response_tokens=48),
        reward=RewardConfig(overlong=OverlongConfig(enabled=False)),
        dynamic_sampling=DynamicSamplingConfig(enabled=False, prompts_per_wave=4),
        batch=BatchConfig(
            prompts_per_step=4, group_size=16, groups_per_update=4, row_tokens=128, rows_per_microbatch=8
        ),
    )
    rows = [{"prompt": text, "answer": "-"} for text in STARTS]
    [line] = train(config, prompts=rows, reward=lambda sample: sample.response_tokens % 2 == 0).metrics
    assert 64 * line["rollout/response_tokens"] >= 2000
    print({name: line[name] for name in line if name.startswith("sync/")}, line["rollout/response_tokens"])
    return line


def test_in_bfloat16_the_sampler_stays_within_5e_3_nats_of_the_trainer(tmp_path, monkeypatch):
    """On the mean over the sampled tokens; the k3 estimate of the KL is at most 1e-4. Every run logs both."""
    line = step(tmp_path / "run", monkeypatch)
    assert 0 < line["sync/logprob_diff_mean"] <= 5e-3
    assert 0 < line["sync/sampler_trainer_kl"] <= 1e-4


def test_as_accelerators_multiply_it_stays_within_15e_3_nats(tmp_path, monkeypatch):
    """They round activations too. The two programs round alike until their sums differ in the last bit, after a few layers
    independently: what is left is the rounding of all operands of 30 layers, and no order of sums can take it away."""
    plain = precision._einsum

    def as_accelerators_do(spec, left, right, dtype):
        return plain(spec, precision.rounded(left, dtype), precision.rounded(right, dtype), dtype)

    monkeypatch.setattr(precision, "_einsum", as_accelerators_do)
    line = step(tmp_path / "run", monkeypatch)
    assert 5e-3 < line["sync/logprob_diff_mean"] <= 15e-3
    assert line["sync/sampler_trainer_kl"] <= 3e-4
