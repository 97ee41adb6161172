"""Runs of a small gpt-oss: attention sinks, windows, experts with biases; and of a small Qwen3.5-MoE: Gated DeltaNet and attention with experts and a gated shared expert.

The trainer's log-probabilities are compared with the sampler's (`sync/logprob_diff_max`), as in tests/run/gated_delta_test.py. The trainer uses the sampler's choice of
experts.
"""

import pytest

from dapo_jax.config import EnvironmentConfig, LoraConfig
from dapo_jax.models.families import understand
from dapo_jax.run.policy import Policy
from dapo_jax.sampling.caches import PAGE_TOKENS
from dapo_jax.testing import tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from tests.run.conftest import assert_same_responses, assert_synchronous

STEPS = 3
FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 8}
"""Twice as many responses as slots, so that responses leave their slots and return."""
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-3, "num_experts_per_tok": 2}  # fmt: skip
"""Epsilon of the norms is 1e-3, as in tests/run/gated_delta_test.py, because a small output before the norm would enlarge rounding errors."""
DECODERS = {
    "gpt_oss": {
        "num_hidden_layers": 2, "intermediate_size": 8, "num_local_experts": 8, "sliding_window": 3, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16, "truncate": False},
    },
    "qwen3_5_moe_text": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_experts": 8, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=DECODERS)
def experts(request, micro, tmp_path_factory):
    """Makes configurations with prompts that responses share in packed rows, and a checkpoint at every step."""
    tokenizer, folder = CharTokenizer("0123456789+=:,?"), tmp_path_factory.mktemp("experts")
    described = SIZES | DECODERS[request.param] | {"model_type": request.param}
    decoder = understand(described | {"vocab_size": tokenizer.vocab_size}, "config.json")
    Policy(decoder=decoder, params=tiny_params(decoder, seed=5), tokenizer=tokenizer).save(folder)

    def make(run_dir=None, **changes):
        fixed = {
            "model__source": str(folder), "steps": STEPS, "batch__row_tokens": 24, "optimizer__epsilon": 0.1, "optimizer__learning_rate": 0.01,
            "dynamic_sampling__surplus": "discard", "checkpoint__every_steps": 1, "checkpoint__keep": 9, "log__rollouts_every_steps": 1,
        }  # fmt: skip
        return micro(run_dir, **fixed | changes)

    return make


# Slow: all tests here compile runs. In the default tier, tests/run/gated_delta_test.py and tests/run/windows_test.py have runs with one half each of these models,
# tests/sampling/routes_test.py has the choice of experts, and tests/models/golden_families_test.py both models.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def flown(experts, run_micro, rows):
    return run_micro(experts(**FLIGHT), eval_rows=rows)


def test_heads_and_experts_split_over_devices_give_the_same_responses(experts, run_micro, rows):
    """The sampler splits 2 key heads over 4 devices. In the first step, shared prompts in packed rows are scored as they were sampled; in later steps, after updates."""
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__tensor": 2, "parallel__sampler_tensor": 4}
    expected, found = (run_micro(experts(**axes), eval_rows=rows) for axes in ({}, mesh))
    assert_synchronous(expected.metrics[1:])
    assert_synchronous(found.metrics[1:])
    assert_same_responses(found, expected)


def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(experts, resumed_at_each_step, flown, same_run):
    """Responses pause between rounds, and continue with other weights."""
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    same_run(resumed_at_each_step(experts, STEPS, **FLIGHT), flown)


def test_preempted_responses_are_read_again(experts, run_micro, rows, flown, monkeypatch):
    """With pages for a single sequence on each device."""
    monkeypatch.setitem(PAGE_TOKENS, "pages", 4)
    assert_same_responses(run_micro(experts(**FLIGHT, sampling__cache_tokens=96), eval_rows=rows), flown)


def test_episodes_are_trained_on_as_they_were_sampled(experts, run_micro):
    environment = EnvironmentConfig(source="guess", max_turns=2, turn_tokens=2)
    config = experts(steps=1, environment=environment, dynamic_sampling__enabled=False)
    [line] = run_micro(config, reward=None).metrics
    assert line["sync/logprob_diff_max"] <= 2e-5


@pytest.mark.parametrize("weight_dtype", ["", "int8"])
def test_adapters_are_sampled_as_they_are_trained(weight_dtype, experts, run_micro, rows):
    """In eight bits, the sampler has another policy. Rounding the weights changes a log-probability by 0.01 to 0.1 on average."""
    lora = {
        "loss__importance_range": [0.0, 2.0],
        "lora": LoraConfig(rank=2, alpha=8.0, targets=["attention"]),
        "sampling__weight_dtype": weight_dtype,
    }
    lines = run_micro(experts(steps=2, **lora), eval_rows=rows).metrics[1:]
    if weight_dtype:
        assert 0.001 < max(line["sync/logprob_diff_mean"] for line in lines) < 0.1
    else:
        assert_synchronous(lines)
