"""Runs of a small Gemma 3 with a sliding window, through every way in which a run may attend.

Prompts have up to 4 and responses up to 6 tokens, and a window has 3. So windows end within prompts and within responses, and cross from one into the other. In each run, the
trainer's log-probabilities are compared with the sampler's (`sync/logprob_diff_max`), whose tolerance of 2e-5 is the one of `lora_test`: float32 sums in another order.
"""

import pytest

from dapo_jax.config import LoraConfig
from dapo_jax.models.families import describe, understand
from dapo_jax.models.folder import read_config
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import Rope
from dapo_jax.sampling.caches import PAGE_TOKENS
from tests.run.conftest import TOKENIZER, assert_same_responses, assert_synchronous

STEPS = 3
CONTEXT = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__context": 2}
"""The rows of a device group are split over two devices."""


@pytest.fixture(scope="module")
def windowed(micro_of):
    described = describe(
        DecoderConfig(
            family="gemma3_text", vocab_size=TOKENIZER.vocab_size, embed_dim=16, layers=3, heads=2, kv_heads=1, head_dim=8, mlp_dim=16, max_positions=128,
            norm_place="both", norm_offset=1.0, qk_norm="head", activation="gelu_tanh", embed_scale=4.0, query_scale=0.25,
            windows=(3, 0, 3), ropes=(Rope(theta=100.0), Rope(theta=10.0)), rope_of_layer=(1, 0, 1),
        )
    )  # fmt: skip
    make = micro_of(understand(described, "config.json"), STEPS)
    assert read_config(make().model.source).windows == (3, 0, 3)
    return make


FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 16}


@pytest.fixture(scope="module")
def flown(windowed, run_micro, rows):
    """A run with rollouts in flight, rows over two devices each, and steps whose responses were sampled by several weights."""
    return run_micro(windowed(**FLIGHT, **CONTEXT), eval_rows=rows)


# Slow: compiles an update and a sampler. tests/parallel has windows with rows over several devices, and tests/sampling/windows_test.py the sampler.
@pytest.mark.slow
def test_packed_rows_over_several_devices_are_those_that_were_sampled(windowed, run_micro, rows):
    assert_synchronous(run_micro(windowed(steps=2, **CONTEXT), eval_rows=rows).metrics[1:])


# Slow: several runs on eight devices. tests/rollout/flight_test.py resumes runs in flight; the test above has windows on eight devices.
@pytest.mark.slow
def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(windowed, resumed_at_each_step, flown, same_run):
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    same_run(resumed_at_each_step(windowed, STEPS, **FLIGHT, **CONTEXT), flown)


# Slow: two runs on eight devices. tests/rollout/flight_test.py has a run with few pages, and tests/sampling/paged_cache_test.py windows.
@pytest.mark.slow
def test_preempted_responses_are_read_again(windowed, run_micro, rows, flown, monkeypatch):
    """With pages for a single sequence on each device."""
    monkeypatch.setitem(PAGE_TOKENS, "pages", 4)
    few = {"sampling__slots": 8, "sampling__cache_tokens": 96}
    assert_same_responses(run_micro(windowed(**FLIGHT | few, **CONTEXT), eval_rows=rows), flown)


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["", "int8"])
def test_adapters_are_sampled_as_they_are_trained(weight_dtype, windowed, run_micro, rows):
    """In eight bits, the sampler has another policy. Rounding the weights of this model changes a log-probability by 0.045 on average, with and without windows."""
    lora = {
        "loss__importance_range": [0.0, 2.0],
        "lora": LoraConfig(rank=2, alpha=8.0),
        "sampling__weight_dtype": weight_dtype,
    }
    lines = run_micro(windowed(**lora), eval_rows=rows).metrics[1:]
    if weight_dtype:
        assert 0.01 < max(line["sync/logprob_diff_mean"] for line in lines) < 0.1
    else:
        assert max(line["sync/logprob_diff_max"] for line in lines) <= 2e-5
