"""Presets have the published sizes; impossible sizes are refused; the order of layers is divided into segments."""

from dataclasses import replace

import pytest

from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.experts import Experts
from dapo_jax.models.families import understand
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.presets import preset
from dapo_jax.testing import tiny_decoder_config


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # The tensor sizes of the published model.safetensors, tied matrices counted once.
        ("smollm2-135m", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-3-1b", 999_885_952),
        # By hand: 18 x (1024 x (6144 + 2 x 2048 + 32 + 3 x 3584) + 4 x 6144 + 32 + 128 + 2048) for Gated DeltaNet layers, and
        # 6 x (1024 x (3 x 2048 + 2 x 512 + 3 x 3584) + 2 x 256 + 2048) for layers with attention, and 1024 x 248,320 + 1024.
        ("qwen3.5-0.8b", 752_393_024),
        # By hand: 30 x (2048 x (8192 + 2 x 4096 + 64) + 4 x 8192 + 64 + 128) for Gated DeltaNet, 10 x (2048 x (8192 + 2 x 512 + 4096) + 512) for attention,
        # 40 x (2048 x (3 x 257 x 512 + 256 + 1 + 2)) for experts, the shared expert, routers, its gate and two norms, and 2048 x (2 x 248,320 + 1).
        ("qwen3.5-35b-a3b", 34_660_610_688),
        # By hand: 24 x (4096 x (2 x 2880 + 1) + 2 x 512 x 2881 + 2880 + 64) for attention with biases and sinks, 24 x 32 x (2880 + 1 + 2880 x 3 x 2880 + 3 x 2880) for
        # routers and experts with biases, and 2880 x (24 x 2 + 1 + 2 x 201,088) for norms and embeddings.
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(name, parameters):
    assert preset(name).parameters == parameters


def test_gemma_3_1b_is_what_its_config_json_describes():
    """The keys that the published file has; all others have the defaults of the class."""
    described = {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262_144, "hidden_size": 1152, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "max_position_embeddings": 32_768,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6,
        "rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert understand(described, "config.json") == preset("gemma-3-1b")


def test_qwen3_5_0_8b_is_what_its_config_json_describes():
    """The keys that the wrapped file on the hub has; all others have the defaults of the class."""
    text = {
        "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "intermediate_size": 3584, "max_position_embeddings": 262_144, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attn_output_gate": True,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10_000_000, "rope_type": "default",
        },
    }  # fmt: skip
    described = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": {"depth": 12},
    }
    assert understand(described, "config.json") == preset("qwen3.5-0.8b")
    without = {key: value for key, value in text.items() if key != "layer_types"}
    assert understand(described | {"text_config": without}, "config.json") == preset("qwen3.5-0.8b")
    assert preset("qwen3.5-0.8b").periods == ((("delta_blocks",) * 3 + ("blocks",), 6),)


def test_a_token_uses_the_chosen_experts_alone():
    """Qwen3-30B-A3B: 8 of 128 experts of 3 x 768 x 2048 parameters in 48 layers, so 120 x 48 x 4,718,592 fewer than in total."""
    config = preset("qwen3-30b-a3b")
    assert config.active_parameters == config.parameters - 120 * 48 * 3 * 768 * 2048 == 3_353_032_704
    assert preset("qwen3-8b").active_parameters == preset("qwen3-8b").parameters


def test_an_unknown_preset_names_the_nearest_and_all():
    with pytest.raises(ValueError, match=r"'qwen2\.5-7B'.* 'qwen2\.5-7b' \(all: tiny, smollm2"):
        preset("qwen2.5-7B")
    with pytest.raises(ValueError, match="no model preset ''"):
        preset("")


@pytest.mark.parametrize("kv_heads", [3, 8, 0])
def test_key_heads_must_divide_query_heads(kv_heads):
    with pytest.raises(ValueError, match=f"kv_heads={kv_heads} must divide heads=4"):
        tiny_decoder_config(heads=4, kv_heads=kv_heads)


def test_layers_repeat_the_kinds_that_are_given():
    config = replace(preset("tiny-qwen3.5"), layers=8)
    assert config.mixers == preset("tiny-qwen3.5").mixers * 2
    assert config.periods == ((("delta_blocks",) * 3 + ("blocks",), 2),)


def test_irregular_orders_are_divided_into_segments_with_few_different_layers():
    """A mixer and an MLP in turn, with attention after every third pair, then pairs alone: 7 layers of 5 equal periods, and 2 layers of 4. Each segment has stacks of its own."""
    delta, moe = GatedDelta(2, 4, 8, 8), Experts(8, 2, normalize=True)
    order = [(delta, None), (None, moe)] * 2 + [(delta, None), (ATTENTION, None), (None, moe)]
    layers = order * 5 + [(delta, None), (None, moe)] * 4
    mixers, mlps = zip(*layers, strict=True)
    config = tiny_decoder_config(layers=len(layers), mixers=mixers, mlps=mlps, mlp_dim=16)
    d, e = "delta_blocks", "mlp_blocks"
    assert config.periods == (((d, e, d, e, d, "blocks", e), 5), ((f"{d}_2", f"{e}_2"), 4))
    assert config.places[35:38] == ((f"{d}_2", 0), (f"{e}_2", 0), (f"{d}_2", 1))
    assert config.routed == tuple(layer for layer, mlp in enumerate(mlps) if mlp)
    assert config.routes == ((19, 2), "uint8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixers": (None,), "mlps": (None,)}, "layer 0 has neither a mixer nor an MLP"),
        ({"mixers": (GatedDelta(2, 4, 8, 8),)}, "at least one layer with attention"),
        (
            {"mlps": (Experts(8, 2, normalize=True), Experts(4, 2, normalize=True))},
            "the same number of experts",
        ),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        tiny_decoder_config(layers=2, **change)
