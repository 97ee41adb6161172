"""Runs of two small Gemma 4: one whose layers have embeddings of their own, and whose last layers read the keys of earlier layers (E2B, E4B), and one whose experts are
next to the MLP, and whose values are the keys in layers without a window (26B-A4B).

Heads have 8 dimensions in layers with a window of 3 tokens, and 16 in the others. Prompts have up to 4 and responses up to 6 tokens, and several responses share a
prompt in a row. In each run, the trainer's log-probabilities are compared with the sampler's (`sync/logprob_diff_max`), as in tests/run/gated_delta_test.py.
"""

import pytest

from dapo_jax.config import EnvironmentConfig, LoraConfig
from dapo_jax.models.families import understand
from dapo_jax.run.policy import Policy
from dapo_jax.sampling.caches import PAGE_TOKENS
from dapo_jax.testing import tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from tests.run.conftest import assert_same_responses, assert_synchronous

STEPS = 2
FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 8}
"""Twice as many responses as slots, so that responses leave their slots and return."""
NEAR, FULL = "sliding_attention", "full_attention"
SIZES = {
    "model_type": "gemma4_text", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "intermediate_size": 16, "sliding_window": 3, "max_position_embeddings": 128, "rms_norm_eps": 1e-2, "final_logit_softcapping": 20.0,
}  # fmt: skip
"""Epsilon of the norms is 1e-2, larger than in tests/run/gated_delta_test.py, because a small output before the norm would enlarge rounding errors."""
MODELS = {
    "shares": {
        "num_hidden_layers": 6, "layer_types": [NEAR, FULL] * 3, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 4,
    },
    "experts": {
        "num_hidden_layers": 4, "layer_types": [NEAR, FULL] * 2, "attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8,
    },
}  # fmt: skip


# Slow: all tests here compile runs. In the default tier, tests/models/golden_families_test.py compares the network, its gradients and its sampler with transformers, and
# tests/run/windows_test.py runs a model with windows.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODELS)
def gemma(request, micro, tmp_path_factory):
    """Makes configurations with prompts that responses share in packed rows, and a checkpoint at every step."""
    tokenizer, folder = CharTokenizer("0123456789+=:,?"), tmp_path_factory.mktemp("gemma")
    words = {"vocab_size": tokenizer.vocab_size, "vocab_size_per_layer_input": tokenizer.vocab_size}
    decoder = understand(SIZES | MODELS[request.param] | words, "config.json")
    Policy(decoder=decoder, params=tiny_params(decoder, seed=5), tokenizer=tokenizer).save(folder)

    def make(run_dir=None, **changes):
        fixed = {
            "model__source": str(folder), "steps": STEPS, "batch__row_tokens": 24, "optimizer__epsilon": 0.1, "optimizer__learning_rate": 0.01,
            "dynamic_sampling__surplus": "discard", "checkpoint__every_steps": 1, "checkpoint__keep": 9, "log__rollouts_every_steps": 1,
        }  # fmt: skip
        return micro(run_dir, **fixed | changes)

    return make


@pytest.fixture(scope="module")
def flown(gemma, run_micro, rows):
    return run_micro(gemma(**FLIGHT), eval_rows=rows)


def test_packed_rows_with_shared_prompts_are_scored_as_they_were_sampled(flown):
    """In the first step, all tokens are of its weights. The tests below compare later steps."""
    assert_synchronous(flown.metrics[1:2])


def test_devices_with_parts_of_heads_and_tables_give_the_same_responses(gemma, run_micro, rows):
    """Each device has some heads, some experts, and some columns of the table with embeddings of the layers."""
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__tensor": 2}
    expected, found = (run_micro(gemma(**axes), eval_rows=rows) for axes in ({}, mesh))
    assert_synchronous(expected.metrics[1:])
    assert_synchronous(found.metrics[1:])
    assert_same_responses(found, expected)


def test_rows_may_be_split_over_devices(gemma, run_micro, rows):
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__context": 2}
    assert_synchronous(run_micro(gemma(**mesh), eval_rows=rows).metrics[1:])


def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(gemma, resumed_at_each_step, flown, same_run):
    """Responses pause between rounds, and continue with other weights."""
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    same_run(resumed_at_each_step(gemma, STEPS, **FLIGHT), flown)


def test_preempted_responses_are_read_again(gemma, run_micro, rows, flown, monkeypatch):
    """With pages for a single sequence on each device."""
    monkeypatch.setitem(PAGE_TOKENS, "pages", 4)
    assert_same_responses(run_micro(gemma(**FLIGHT, sampling__cache_tokens=96), eval_rows=rows), flown)


def test_episodes_are_trained_on_as_they_were_sampled(gemma, run_micro):
    """Sequences are parked between turns."""
    environment = EnvironmentConfig(source="guess", max_turns=2, turn_tokens=2)
    config = gemma(steps=1, environment=environment, dynamic_sampling__enabled=False)
    [line] = run_micro(config, reward=None).metrics
    assert line["sync/logprob_diff_max"] <= 2e-5


@pytest.mark.parametrize("weight_dtype", ["", "int8"])
def test_adapters_are_sampled_as_they_are_trained(weight_dtype, gemma, run_micro, rows):
    """In eight bits, the sampler has another policy."""
    lora = {
        "loss__importance_range": [0.0, 2.0],
        "lora": LoraConfig(rank=2, alpha=8.0, targets=["attention", "mlp"]),
        "sampling__weight_dtype": weight_dtype,
    }
    lines = run_micro(gemma(**lora), eval_rows=rows).metrics[1:]
    if weight_dtype:
        assert 1e-4 < max(line["sync/logprob_diff_max"] for line in lines) < 0.5
    else:
        assert_synchronous(lines)
