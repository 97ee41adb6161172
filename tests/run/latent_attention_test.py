"""Runs of a small DeepSeek-V3: latent attention, one layer with an MLP, and one with experts.

Prompts have up to 4 and responses up to 6 tokens, and several responses share a prompt in a row. In each run, the trainer's log-probabilities are compared with
the sampler's (`sync/logprob_diff_max`), whose tolerance of 2e-5 is the one of `lora_test`: float32 sums in another order.
"""

import pytest

from dapo_jax.config import EnvironmentConfig, LoraConfig
from dapo_jax.models.families import understand
from dapo_jax.run.policy import Policy
from dapo_jax.testing import tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from tests.run.conftest import assert_same_responses, assert_synchronous

STEPS = 3
FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 8}
"""Twice as many responses as slots, so that responses leave their slots and return."""
SIZES = {
    "model_type": "deepseek_v3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "max_position_embeddings": 128,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 4, "topk_group": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def latent(micro, tmp_path_factory):
    """Makes configurations with prompts that responses share in packed rows, and a checkpoint at every step."""
    tokenizer, folder = CharTokenizer("0123456789+=:,?"), tmp_path_factory.mktemp("latent")
    decoder = understand(SIZES | {"vocab_size": tokenizer.vocab_size}, "config.json")
    Policy(decoder=decoder, params=tiny_params(decoder, seed=5), tokenizer=tokenizer).save(folder)

    def make(run_dir=None, **changes):
        fixed = {
            "model__source": str(folder), "steps": STEPS, "batch__row_tokens": 24, "optimizer__epsilon": 0.1, "optimizer__learning_rate": 0.01,
            "dynamic_sampling__surplus": "discard", "checkpoint__every_steps": 1, "checkpoint__keep": 9, "log__rollouts_every_steps": 1,
        }  # fmt: skip
        return micro(run_dir, **fixed | changes)

    return make


@pytest.fixture(scope="module")
def flown(latent, run_micro, rows):
    return run_micro(latent(**FLIGHT), eval_rows=rows)


def test_packed_rows_with_shared_prompts_are_scored_as_they_were_sampled(flown):
    """In the first step, all tokens are of its weights. The slow tests compare later steps."""
    assert_synchronous(flown.metrics[1:2])


# Slow: two runs. Waves are also tested with rows split over eight devices.
@pytest.mark.slow
def test_heads_split_over_devices_give_the_same_responses(latent, run_micro, rows):
    """The latents are on each device along `tensor`."""
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__tensor": 2}
    expected, found = (run_micro(latent(**axes), eval_rows=rows) for axes in ({}, mesh))
    assert_synchronous(found.metrics[1:])
    assert_same_responses(found, expected)


# Slow: each of these tests is a run or several. tests/run/gated_delta_test.py runs the same programs of the engine in the default tier.
@pytest.mark.slow
def test_rows_may_be_split_over_devices(latent, run_micro, rows):
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__context": 2}
    assert_synchronous(run_micro(latent(**mesh), eval_rows=rows).metrics[1:])


@pytest.mark.slow
def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(latent, resumed_at_each_step, flown, same_run):
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    same_run(resumed_at_each_step(latent, STEPS, **FLIGHT), flown)


@pytest.mark.slow
def test_preempted_responses_are_read_again(latent, run_micro, rows, flown):
    """With pages for a single sequence on each device."""
    few = {"sampling__cache_tokens": 96, "sampling__page_tokens": 4}
    assert_same_responses(run_micro(latent(**FLIGHT | few), eval_rows=rows), flown)


@pytest.mark.slow
def test_episodes_are_trained_on_as_they_were_sampled(latent, run_micro):
    environment = EnvironmentConfig(source="guess", max_turns=2, turn_tokens=2)
    config = latent(steps=1, environment=environment, dynamic_sampling__enabled=False)
    [line] = run_micro(config, reward=None).metrics
    assert line["sync/logprob_diff_max"] <= 2e-5


@pytest.mark.slow
def test_adapters_are_sampled_as_they_are_trained(latent, run_micro, rows):
    adapters = LoraConfig(rank=2, alpha=8.0, targets=["latent_attention", "mlp"])
    found = run_micro(latent(steps=2, lora=adapters), eval_rows=rows)
    assert_synchronous(found.metrics[1:])
