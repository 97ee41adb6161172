"""Runs of a small Qwen3.5: two of three layers are Gated DeltaNet.

Prompts have up to 4 and responses up to 6 tokens, and several responses share a prompt in a row. In each run, the trainer's log-probabilities are compared with
the sampler's (`sync/logprob_diff_max`), whose tolerance of 2e-5 is the one of `lora_test`: float32 sums in another order.
"""

import pytest

from dapo_jax.config import ConfigError, EnvironmentConfig, LoraConfig
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.families import describe, understand
from dapo_jax.models.folder import read_config
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import Rope
from dapo_jax.sampling.caches import PAGE_TOKENS
from tests.run.conftest import TOKENIZER, assert_same_responses, assert_synchronous

STEPS = 2
SMOOTH = 1e-3
"""Epsilon of the norms in runs on two meshes, chosen so that 2e-5 bounds the rounding error. The other runs have the usual 1e-6.

The norm after the recurrence divides an output by sqrt(r^2 + epsilon), where r is its RMS. This r is near 0 if the query is almost orthogonal to the keys of the
sequence, such as the key of a first token. Rounding errors then grow by up to 1 / sqrt(epsilon): 32 times, but 1,000 times with the usual 1e-6.

For 5,120 log-probabilities of random tokens, a mesh of 2 x 2 x 2 and one device differ by up to 5e-6 with 1e-3, and by up to 2.1e-5 with 1e-6. With 1e-6, each
of them differs from float64 by about the same: by up to 1.7e-5 and 2.2e-5. With 1e-3, it is 6e-6 and 4e-6.
"""
MIXERS = (GatedDelta(2, 4, 8, 8), GatedDelta(2, 4, 8, 8), ATTENTION)
FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 8}
"""Twice as many responses as slots, so that responses leave their slots and return with their recurrent states."""


def qwen(**changes):
    described = describe(
        DecoderConfig(
            family="qwen3_5_text", vocab_size=TOKENIZER.vocab_size, embed_dim=16, layers=3, heads=4, kv_heads=2, head_dim=8, mlp_dim=16, max_positions=128,
            qk_norm="head", norm_offset=1.0, attention_gate=True, ropes=(Rope(share=0.5),), mixers=MIXERS, **changes,
        )
    )  # fmt: skip
    return understand(described, "config.json")


@pytest.fixture(scope="module")
def delta(micro_of):
    make = micro_of(qwen(), STEPS)
    assert read_config(make().model.source).mixers == MIXERS
    return make


@pytest.fixture(scope="module")
def flown(delta, run_micro, rows):
    return run_micro(delta(**FLIGHT), eval_rows=rows)


# Slow: a run in flight, and one that is resumed after each step. tests/run/toy_kind_test.py has such a run with another fixed state, and the tests of golden models
# compare the sampler of Gated DeltaNet with the trainer.
@pytest.mark.slow
def test_packed_rows_with_shared_prompts_are_scored_as_they_were_sampled(flown):
    """In the first step, all tokens are of its weights. The slow tests compare later steps."""
    assert_synchronous(flown.metrics[1:2])


# Slow: two runs. Waves are also tested with rows split over eight devices.
@pytest.mark.slow
def test_heads_split_over_devices_give_the_same_responses(micro_of, run_micro, rows):
    """Sums over heads and over the weights' parts have another order, in the first step as in the steps after updates."""
    smooth = micro_of(qwen(norm_eps=SMOOTH), STEPS)
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__tensor": 2}
    expected, found = (run_micro(smooth(**axes), eval_rows=rows) for axes in ({}, mesh))
    assert_synchronous(found.metrics[1:])
    assert_same_responses(found, expected)


def test_rows_split_over_devices_are_refused(delta, run_micro):
    with pytest.raises(ConfigError, match=r"parallel\.context=2 .*parallel\.context=1"):
        run_micro(delta(parallel__data=2, parallel__fsdp=2, parallel__context=2))


@pytest.mark.slow
def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(delta, resumed_at_each_step, flown, same_run):
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    same_run(resumed_at_each_step(delta, STEPS, **FLIGHT), flown)


# Slow: another run. tests/rollout/flight_test.py has a run with few pages, and tests/sampling/turns_test.py states that are re-prefilled.
@pytest.mark.slow
def test_preempted_responses_are_read_again(delta, run_micro, rows, flown, monkeypatch):
    """With pages for a single sequence on each device."""
    monkeypatch.setitem(PAGE_TOKENS, "pages", 4)
    assert_same_responses(run_micro(delta(**FLIGHT, sampling__cache_tokens=96), eval_rows=rows), flown)


# Slow: another run. tests/sampling/turns_test.py has the states between turns, and tests/run/turns_test.py episodes that are trained on.
@pytest.mark.slow
def test_episodes_are_trained_on_as_they_were_sampled(delta, run_micro):
    environment = EnvironmentConfig(source="guess", max_turns=2, turn_tokens=2)
    config = delta(steps=1, environment=environment, dynamic_sampling__enabled=False)
    [line] = run_micro(config, reward=None).metrics
    assert line["sync/logprob_diff_max"] <= 2e-5


# Slow: a run. tests/run/lora_test.py runs adapters; tests/models/golden_families_test.py merges the adapters of these layers.
@pytest.mark.slow
def test_adapters_are_sampled_as_they_are_trained(delta, run_micro, rows):
    adapters = LoraConfig(rank=2, alpha=8.0, targets=["q_proj", "linear_attention", "mlp"])
    found = run_micro(delta(steps=2, lora=adapters), eval_rows=rows)
    assert_synchronous(found.metrics[1:])
