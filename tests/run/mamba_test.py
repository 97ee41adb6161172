"""Runs of a small Nemotron-H: Mamba-2, attention and experts with latent projections, one of them in each layer; and of a small Granite 4 H, with one group of heads.

The trainer's log-probabilities are compared with the sampler's (`sync/logprob_diff_max`), as in tests/run/gated_delta_test.py.
"""

import pytest

from dapo_jax.config import LoraConfig
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.experts import Experts
from dapo_jax.models.families import describe, understand
from dapo_jax.models.folder import read_config
from dapo_jax.models.gated import Gated
from dapo_jax.models.mamba import Mamba
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.run.policy import Policy
from dapo_jax.testing import tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from tests.run.conftest import assert_same_responses, assert_synchronous

STEPS = 3
EXPERTS = Experts(
    4, 2, normalize=True, shared_dim=8, sigmoid=True, choice_bias=True, scale=1.5, groups=2, chosen_groups=1, latent=8
)  # fmt: skip
SIZES = {"embed_dim": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_dim": 16, "max_positions": 128, "norm_eps": 1e-3, "ropes": (None,)}  # fmt: skip
"""Epsilon of the norms is 1e-3, as in tests/run/gated_delta_test.py, because a small output before the norm would enlarge rounding errors."""
DECODERS = {
    "nemotron_h": {
        "layers": 4, "mixers": (Mamba(4, 8, 2, 8), None, ATTENTION, None), "mlps": (None, EXPERTS, None, Gated(24)), "mlp_gate": False,
        "activation": "relu2", "tied_embeddings": False,
    },
    "granitemoehybrid": {
        "layers": 3, "mixers": (Mamba(4, 8, 1, 8), Mamba(4, 8, 1, 8), ATTENTION), "mlps": (Experts(4, 2, normalize=True, shared_dim=8),),
        "residual_scale": 0.7, "logit_divisor": 1.5, "query_scale": 0.3, "embed_scale": 2.0,
    },
}  # fmt: skip
FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 8}
"""Twice as many responses as slots, so that responses leave their slots and return with their recurrent states."""


@pytest.fixture(scope="module", params=DECODERS)
def hybrid(request, micro, tmp_path_factory):
    """Makes configurations with prompts that responses share in packed rows."""
    tokenizer, folder = CharTokenizer("0123456789+=:,?"), tmp_path_factory.mktemp("hybrid")
    decoder = DecoderConfig(
        family=request.param, vocab_size=tokenizer.vocab_size, **SIZES, **DECODERS[request.param]
    )
    assert understand(describe(decoder), "config.json") == decoder
    Policy(decoder=decoder, params=tiny_params(decoder, seed=5), tokenizer=tokenizer).save(folder)
    assert read_config(folder) == decoder

    def make(run_dir=None, **changes):
        fixed = {
            "model__source": str(folder), "steps": STEPS, "batch__row_tokens": 24, "optimizer__epsilon": 0.1, "optimizer__learning_rate": 0.01,
            "dynamic_sampling__surplus": "discard", "checkpoint__every_steps": 1, "checkpoint__keep": 9, "log__rollouts_every_steps": 1,
        }  # fmt: skip
        return micro(run_dir, **fixed | changes)

    return make


# Slow: all tests here compile runs. In the default tier, tests/run/gated_delta_test.py runs the same functions with another rule, and
# tests/models/recurrent_test.py has the rule of Mamba-2.
pytestmark = pytest.mark.slow


def test_heads_split_over_devices_give_the_same_responses(hybrid, run_micro, rows):
    """Each device along `tensor` has some heads and groups, and a single group whole."""
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__tensor": 2}
    expected, found = (run_micro(hybrid(**axes), eval_rows=rows) for axes in ({}, mesh))
    assert_synchronous(expected.metrics[1:])
    assert_synchronous(found.metrics[1:])
    assert_same_responses(found, expected)


def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(hybrid, resumed_at_each_step, run_micro, rows, same_run):  # fmt: skip
    flown = run_micro(hybrid(**FLIGHT), eval_rows=rows)
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    same_run(resumed_at_each_step(hybrid, STEPS, **FLIGHT), flown)
    few = {"sampling__cache_tokens": 96, "sampling__page_tokens": 4}
    assert_same_responses(run_micro(hybrid(**FLIGHT | few), eval_rows=rows), flown)


def test_adapters_and_eight_bits_are_sampled_as_they_are_trained(hybrid, run_micro, rows):
    adapters = LoraConfig(rank=2, alpha=8.0, targets=["q_proj", "out_proj"])
    found = run_micro(hybrid(steps=2, lora=adapters), eval_rows=rows)
    assert_synchronous(found.metrics[1:])
