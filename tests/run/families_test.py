"""Runs of small models of families whose layers differ: Gemma 4, Mamba-2 (Nemotron-H and Granite 4 H), latent attention (DeepSeek-V3), gpt-oss and Qwen3.5-MoE.

One Gemma 4 has embeddings for each layer, and its last layers read the keys of earlier layers (E2B, E4B). The other has experts next to the MLP, and its values are
the keys in layers without a window (26B-A4B). Granite 4 H has one group of heads. gpt-oss has attention sinks, windows, and experts with biases.

Prompts have up to 4 and responses up to 6 tokens, and several responses share a prompt in a row. In each run, the trainer's log-probabilities are compared with the
sampler's (`sync/logprob_diff_max`), as in tests/run/gated_delta_test.py. The trainer uses the sampler's choice of experts.
"""

from dataclasses import dataclass, replace

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
from dapo_jax.sampling.caches import PAGE_TOKENS
from tests.run.conftest import TOKENIZER, assert_same_responses, assert_synchronous

FLIGHT = {"rollout__round_tokens": 2, "rollout__in_flight": 16, "sampling__slots": 8}
"""Twice as many responses as slots, so that responses leave their slots and return with their states."""
SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SMOOTH = SIZES | {"rms_norm_eps": 1e-3}
"""Epsilon of the norms is 1e-3 or 1e-2, as in tests/run/gated_delta_test.py, because a small output before the norm would enlarge rounding errors."""
NEAR, FULL = "sliding_attention", "full_attention"
GEMMA4 = SIZES | {
    "model_type": "gemma4_text", "global_head_dim": 16, "intermediate_size": 16, "sliding_window": 3, "rms_norm_eps": 1e-2, "final_logit_softcapping": 20.0,
    "vocab_size_per_layer_input": TOKENIZER.vocab_size,
}  # fmt: skip
"""Heads have 8 dimensions in layers with a window of 3 tokens, and 16 in the others."""
DECODER = {
    "embed_dim": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 8,
    "max_positions": 128,
    "tied_embeddings": False,
}
HYBRID = DECODER | {"mlp_dim": 16, "norm_eps": 1e-3, "ropes": (None,)}
GROUPED = Experts(
    4, 2, normalize=True, shared_dim=8, sigmoid=True, choice_bias=True, scale=1.5, groups=2, chosen_groups=1
)


def described(**values):
    return understand({"vocab_size": TOKENIZER.vocab_size} | values, "config.json")


def decoder(**values):
    """Also checks that its config.json describes it."""
    made = DecoderConfig(vocab_size=TOKENIZER.vocab_size, **values)
    assert understand(describe(made), "config.json") == made
    return made


@dataclass(frozen=True)
class Model:
    decoder: DecoderConfig
    targets: tuple[str, ...]
    """The weights that have adapters."""
    steps: int = 3
    sampler_tensor: int = 0
    recurrent: bool = False
    rounding: tuple[str, float, float] = ("sync/logprob_diff_max", 1e-4, 0.5)
    """A metric and its range in a run whose sampler has weights of eight bits."""


MODELS = {
    "gemma4_shares": Model(
        described(
            **GEMMA4, num_hidden_layers=6, layer_types=[NEAR, FULL] * 3, num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=4
        ),
        targets=("attention", "mlp"), steps=2,
    ),
    "gemma4_experts": Model(
        described(
            **GEMMA4, num_hidden_layers=4, layer_types=[NEAR, FULL] * 2, attention_k_eq_v=True, num_global_key_value_heads=2, hidden_size_per_layer_input=0,
            enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=8,
        ),
        targets=("attention", "mlp"), steps=2,
    ),
    "deepseek_v3": Model(
        decoder(
            **DECODER | {"kv_heads": 4, "head_dim": 4}, family="deepseek_v3", layers=2, mixers=(LatentAttention(8, 6, 4, 8, 16),), ropes=(Rope(),),
            mlps=(Gated(16), GROUPED),
        ),
        targets=("latent_attention", "mlp"),
    ),
    "nemotron_h": Model(
        decoder(
            **HYBRID, family="nemotron_h", layers=4, mixers=(Mamba(4, 8, 2, 8), None, ATTENTION, None),
            mlps=(None, replace(GROUPED, latent=8), None, Gated(24)), mlp_gate=False, activation="relu2",
        ),
        targets=("q_proj", "out_proj"), recurrent=True,
    ),
    "granitemoehybrid": Model(
        decoder(
            **HYBRID, family="granitemoehybrid", layers=3, mixers=(Mamba(4, 8, 1, 8), Mamba(4, 8, 1, 8), ATTENTION),
            mlps=(Experts(4, 2, normalize=True, shared_dim=8),), residual_scale=0.7, logit_divisor=1.5, query_scale=0.3, embed_scale=2.0,
        ),
        targets=("q_proj", "out_proj"), recurrent=True,
    ),
    "gpt_oss": Model(
        described(
            **SMOOTH, model_type="gpt_oss", num_hidden_layers=2, intermediate_size=8, num_local_experts=8, num_experts_per_tok=2, sliding_window=3,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16, "truncate": False},
        ),
        targets=("attention",), sampler_tensor=4, rounding=("sync/logprob_diff_mean", 0.001, 0.1),
    ),
    "qwen3_5_moe": Model(
        described(
            **SMOOTH, model_type="qwen3_5_moe_text", num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", FULL], num_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=16, linear_num_key_heads=4, linear_num_value_heads=8,
            linear_key_head_dim=8, linear_value_head_dim=8,
        ),
        targets=("attention",), sampler_tensor=4, rounding=("sync/logprob_diff_mean", 0.001, 0.1), recurrent=True,
    ),
}  # fmt: skip

# Slow: all tests here compile runs. In the default tier, tests/run/gated_delta_test.py and tests/run/toy_kind_test.py have runs, tests/sampling/routes_test.py has the
# choice of experts, and tests/models/golden_families_test.py compares each network, its gradients and its sampler.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODELS)
def family(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def small(family, micro_of):
    """Makes configurations of the model's runs."""
    make = micro_of(family.decoder, family.steps)
    assert read_config(make().model.source) == family.decoder
    return make


@pytest.fixture(scope="module")
def flown(small, run_micro, rows):
    return run_micro(small(**FLIGHT), eval_rows=rows)


def test_packed_rows_with_shared_prompts_are_scored_as_they_were_sampled(flown):
    """In the first step, all tokens are of its weights. The other tests compare later steps."""
    assert_synchronous(flown.metrics[1:2])


def test_heads_split_over_devices_give_the_same_responses(small, run_micro, rows, family):
    """Each device along `tensor` has some heads, groups and experts, and a single group, or the latents, whole. A sampler may split 2 key heads over 4 devices."""
    mesh = {
        "parallel__data": 2,
        "parallel__fsdp": 2,
        "parallel__tensor": 2,
        "parallel__sampler_tensor": family.sampler_tensor,
    }
    expected, found = (run_micro(small(**axes), eval_rows=rows) for axes in ({}, mesh))
    assert_synchronous(expected.metrics[1:])
    assert_synchronous(found.metrics[1:])
    assert_same_responses(found, expected)


def test_rows_may_be_split_over_devices_unless_the_mixer_is_recurrent(small, run_micro, rows, family):
    config = small(parallel__data=2, parallel__fsdp=2, parallel__context=2)
    if family.recurrent:
        with pytest.raises(ConfigError, match=r"parallel\.context=2 .*parallel\.context=1"):
            run_micro(config)
    else:
        assert_synchronous(run_micro(config, eval_rows=rows).metrics[1:])


def test_a_run_with_rollouts_in_flight_resumes_bit_for_bit(
    small, resumed_at_each_step, flown, same_run, family
):
    """Responses pause between rounds, and continue with other weights."""
    assert any(line["rollout/age_max"] > 0 for line in flown.metrics[1:])
    same_run(resumed_at_each_step(small, family.steps, **FLIGHT), flown)


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
    lora = {
        "loss__importance_range": [0.0, 2.0],
        "lora": LoraConfig(rank=2, alpha=8.0, targets=[*family.targets]),
        "sampling__weight_dtype": weight_dtype,
    }
    result = run_micro(small(steps=2, **lora), eval_rows=rows)
    lines, (_, file) = result.metrics[1:], read_adapter(result.run_dir / "model")
    trained = parted(result.policy.params)[0]
    jax.tree.map(np.testing.assert_array_equal, place_adapters(result.policy.decoder, file), trained)
    stored = load_file(result.run_dir / "model" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(np.float32)}
    if weight_dtype:
        name, low, high = family.rounding
        assert low < max(line[name] for line in lines) < high
    else:
        assert_synchronous(lines)
