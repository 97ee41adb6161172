"""Runs of small models with Mamba-2 (Nemotron-H, and Granite 4 H, which has one group of heads) and with latent attention (DeepSeek-V3).

Prompts have up to 4 and responses up to 6 tokens, and several responses share a prompt in a row. In each run, the trainer's log-probabilities are compared with
the sampler's (`sync/logprob_diff_max`), whose tolerance of 2e-5 is the one of `lora_test`: float32 sums in another order.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dapo_jax.config import ConfigError, EnvironmentConfig, LoraConfig
from dapo_jax.models.adapter_folder import read_adapter
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.experts import Experts
from dapo_jax.models.families import describe, understand
from dapo_jax.models.folder import read_config
from dapo_jax.models.gated import Gated
from dapo_jax.models.latent_attention import LatentAttention
from dapo_jax.models.lora import parted
from dapo_jax.models.mamba import Mamba
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import Rope
from dapo_jax.models.tensors import place_adapters
from dapo_jax.run.policy import Policy
from dapo_jax.sampling.caches import PAGE_TOKENS
from dapo_jax.testing import tiny_params
from dapo_jax.text.tokenizers import CharTokenizer
from tests.run.conftest import assert_same_responses, assert_synchronous

STEPS = 3
FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 8}
"""Twice as many responses as slots, so that responses leave their slots and return with their states."""
GROUPED = Experts(
    4, 2, normalize=True, shared_dim=8, sigmoid=True, choice_bias=True, scale=1.5, groups=2, chosen_groups=1
)
SIZES = {"embed_dim": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_dim": 8, "max_positions": 128, "tied_embeddings": False}  # fmt: skip
HYBRID = SIZES | {"mlp_dim": 16, "norm_eps": 1e-3, "ropes": (None,)}
"""Epsilon of the norms is 1e-3, as in tests/run/gated_delta_test.py, because a small output before the norm would enlarge rounding errors."""
DECODERS = {
    "deepseek_v3": SIZES | {
        "layers": 2, "kv_heads": 4, "head_dim": 4, "mixers": (LatentAttention(8, 6, 4, 8, 16),), "ropes": (Rope(),), "mlps": (Gated(16), GROUPED),
    },
    "nemotron_h": HYBRID | {
        "layers": 4, "mixers": (Mamba(4, 8, 2, 8), None, ATTENTION, None), "mlps": (None, replace(GROUPED, latent=8), None, Gated(24)), "mlp_gate": False,
        "activation": "relu2",
    },
    "granitemoehybrid": HYBRID | {
        "layers": 3, "mixers": (Mamba(4, 8, 1, 8), Mamba(4, 8, 1, 8), ATTENTION), "mlps": (Experts(4, 2, normalize=True, shared_dim=8),),
        "residual_scale": 0.7, "logit_divisor": 1.5, "query_scale": 0.3, "embed_scale": 2.0,
    },
}  # fmt: skip
RECURRENT = ("nemotron_h", "granitemoehybrid")
pytestmark = pytest.mark.slow
"""Slow: the runs of three further models. tests/run/gated_delta_test.py runs a recurrence in the default tier, and the sampler and the rows of each mixer are compared in
tests/models/golden_families_test.py."""


@pytest.fixture(scope="module", params=DECODERS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def small(family, micro, tmp_path_factory):
    """Makes configurations with prompts that responses share in packed rows, and a checkpoint at every step."""
    tokenizer, folder = CharTokenizer("0123456789+=:,?"), tmp_path_factory.mktemp(family)
    decoder = DecoderConfig(family=family, vocab_size=tokenizer.vocab_size, **DECODERS[family])
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


@pytest.fixture(scope="module")
def flown(small, run_micro, rows):
    return run_micro(small(**FLIGHT), eval_rows=rows)


def test_packed_rows_with_shared_prompts_are_scored_as_they_were_sampled(flown):
    """In the first step, all tokens are of its weights. The other tests compare later steps."""
    assert_synchronous(flown.metrics[1:2])


# Slow: each of the tests below is a run or several. tests/run/gated_delta_test.py runs the same programs of the engine in the default tier.
def test_heads_split_over_devices_give_the_same_responses(small, run_micro, rows):
    """Each device along `tensor` has some heads and groups, and a single group, or the latents, whole."""
    mesh = {"parallel__data": 2, "parallel__fsdp": 2, "parallel__tensor": 2}
    expected, found = (run_micro(small(**axes), eval_rows=rows) for axes in ({}, mesh))
    assert_synchronous(expected.metrics[1:])
    assert_synchronous(found.metrics[1:])
    assert_same_responses(found, expected)


def test_rows_may_be_split_over_devices_unless_the_mixer_is_recurrent(small, run_micro, rows, family):
    config = small(parallel__data=2, parallel__fsdp=2, parallel__context=2)
    if family in RECURRENT:
        with pytest.raises(ConfigError, match=r"parallel\.context=2 .*parallel\.context=1"):
            run_micro(config)
    else:
        assert_synchronous(run_micro(config, eval_rows=rows).metrics[1:])


def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(small, resumed_at_each_step, flown, same_run):
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    same_run(resumed_at_each_step(small, STEPS, **FLIGHT), flown)


def test_preempted_responses_are_read_again(small, run_micro, rows, flown, monkeypatch):
    """With pages for a single sequence on each device."""
    monkeypatch.setitem(PAGE_TOKENS, "pages", 4)
    assert_same_responses(run_micro(small(**FLIGHT, sampling__cache_tokens=96), eval_rows=rows), flown)


def test_episodes_are_trained_on_as_they_were_sampled(small, run_micro):
    """Between two turns, an episode keeps its pages and its states."""
    environment = EnvironmentConfig(source="guess", max_turns=2, turn_tokens=2)
    config = small(steps=1, environment=environment, dynamic_sampling__enabled=False)
    [line] = run_micro(config, reward=None).metrics
    assert line["sync/logprob_diff_max"] <= 2e-5


@pytest.mark.parametrize("weight_dtype", ["", "int8"])
def test_adapters_are_sampled_as_they_are_trained(weight_dtype, small, run_micro, rows, family):
    """In eight bits, the sampler has another policy. The saved adapters are the trained ones, bit for bit."""
    targets = ["q_proj", "out_proj"] if family in RECURRENT else ["latent_attention", "mlp"]
    lora = {
        "loss__importance_range": [0.0, 2.0],
        "lora": LoraConfig(rank=2, alpha=8.0, targets=targets),
        "sampling__weight_dtype": weight_dtype,
    }
    result = run_micro(small(steps=2, **lora), eval_rows=rows)
    lines, (_, file) = result.metrics[1:], read_adapter(result.run_dir / "model")
    trained = parted(result.policy.params)[0]
    jax.tree.map(np.testing.assert_array_equal, place_adapters(result.policy.decoder, file), trained)
    stored = load_file(result.run_dir / "model" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(np.float32)}
    if weight_dtype:
        assert 1e-4 < max(line["sync/logprob_diff_max"] for line in lines) < 0.5
    else:
        assert_synchronous(lines)
