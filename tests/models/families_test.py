"""config.json: both notations of rotary scaling, keys that older files lack, and unsupported keys."""

import json
import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.experts import Experts
from dapo_jax.models.families import FAMILIES, WRAPPED, describe, understand
from dapo_jax.models.gated import Gated
from dapo_jax.models.mamba import Mamba
from dapo_jax.models.presets import PRESETS, preset
from dapo_jax.models.rope import Rope, RopeScaling
from dapo_jax.testing import tiny_decoder_config

SCALINGS = {
    "none": None,
    "linear": RopeScaling(kind="linear", factor=4.0),
    "llama3": RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=5.0, original_max_positions=16
    ),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_max_positions=16),
    "yarn, all fields": RopeScaling(
        kind="yarn",
        factor=4.0,
        original_max_positions=16,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.5,
    ),
}
GOLDEN = Path(__file__).parents[1] / "golden" / "families"
QWEN2 = tiny_decoder_config(qkv_bias=True)


def without(described, *keys):
    return {key: value for key, value in described.items() if key not in keys}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("absent", [(), ("rope_theta", "rope_scaling"), ("rope_parameters",)])
def test_a_scaling_is_read_from_either_notation(scaling, absent):
    config = tiny_decoder_config(ropes=(Rope(theta=5e5, scaling=SCALINGS[scaling]),))
    assert understand(without(describe(config), *absent), "config.json") == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_written_and_read(name):
    assert understand(describe(preset(name)), "config.json") == preset(name)


def test_the_original_context_of_phi3_has_a_default():
    """4096, not max_position_embeddings as in other families: scores grow by sqrt(1 + ln(8192 / 4096) / ln(4096))."""
    changes = rope("phi3", **{LENGTH: None}) | {LENGTH: ..., "max_position_embeddings": 8192}
    scaling = understand(golden("phi3", changes), "config.json").ropes[0].scaling
    assert (scaling.factor, scaling.original_max_positions) == (2.0, 4096)


def test_the_old_and_the_new_name_of_the_kind_are_understood():
    described = without(describe(QWEN2), "rope_parameters")
    for names in ({"type": "linear"}, {"type": "linear", "rope_type": "linear"}):
        config = understand({**described, "rope_scaling": {**names, "factor": 2}}, "config.json")
        assert config.ropes[0].scaling == RopeScaling(kind="linear", factor=2.0)


def test_the_original_context_of_a_scaling_may_be_outside_of_it():
    """As transformers does: max_position_embeddings (64 here), unless there is a key of the name at the top."""
    described = without(describe(QWEN2), "rope_parameters") | {
        "rope_scaling": {"type": "yarn", "factor": 4.0}
    }
    assert understand(described, "config.json").ropes[0].scaling.original_max_positions == 64
    described["original_max_position_embeddings"] = 32
    assert understand(described, "config.json").ropes[0].scaling.original_max_positions == 32


def test_keys_that_older_files_lack_have_the_defaults_of_transformers():
    described = describe(tiny_decoder_config(kv_heads=4, tied_embeddings=False))
    older = without(
        described, "num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "tie_word_embeddings"
    )
    assert understand(older, "config.json") == understand(described, "config.json")
    qwen3 = describe(tiny_decoder_config(qk_norm="head", head_dim=128))
    assert understand(without(qwen3, "head_dim"), "config.json").head_dim == 128


def test_null_means_absent():
    described = describe(QWEN2) | {
        "quantization_config": None,
        "layer_types": None,
        "partial_rotary_factor": None,
    }
    assert understand(described, "config.json") == QWEN2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* 'silu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* remove the key"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "architectures .* Qwen2ForCausalLM"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, "rope_type 'ntk'.* default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "lacks the key 'factor', .* 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, r"mrope_section=\[1\]"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "truncate": False}}, "truncate=False .* 'linear'"),
        ({"rope_scaling": {"type": "llama3", "factor": 0.5}}, "config.json: .*factor"),
        ({"hidden_size": ...}, "config.json lacks the key 'hidden_size'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"num_key_value_heads": 3}, "config.json: kv_heads=3 .*heads=4"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused_by_key(changes, message):
    described = without(describe(QWEN2), "rope_parameters") | changes
    with pytest.raises(ValueError, match=message):
        understand({key: value for key, value in described.items() if value is not ...}, "config.json")


def golden(name, changes=(), *, older=False):
    """The config.json of a golden model, with changes. `...` removes a key."""
    path = GOLDEN / name / ("config.older.json" if older else "config.json")
    described = json.loads(path.read_text()) | dict(changes)
    return {key: value for key, value in described.items() if value is not ...}


def rope(name, **changes):
    return {"rope_parameters": golden(name)["rope_parameters"] | changes}


def full_rope(**changes):
    """Changes in the rotation of the layers without a window of a Gemma 4."""
    ropes = golden("gemma4_e")["rope_parameters"]
    return {"rope_parameters": ropes | {"full_attention": ropes["full_attention"] | changes}}


FULL = Rope(theta=500.0, share=0.25, proportional=True, head_dim=16)
UNIFIED = {"model_type": "gemma4_unified_text", "architectures": ...}


FLAT = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
LENGTH = "original_max_position_embeddings"
MINISTRAL = RopeScaling(
    kind="yarn", factor=16.0, original_max_positions=16_384, mscale_all_dim=1.0, attention_factor=1.0
)


def inside(**changes):
    """Changes in the text model of a model for images and text."""
    return {"text_config": golden("gemma3_wrapped")["text_config"] | changes}


@pytest.mark.parametrize(
    ("name", "changes", "field", "value"),
    [
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 8192}, "windows", (4096,) * 5),
        ("mistral", {"sliding_window": None}, "windows", ()),
        ("mistral", {"sliding_window": 256}, "windows", ()),  # as many as the positions
        ("gemma2", {"attn_logit_softcapping": ..., "final_logit_softcapping": None}, "score_cap", 50.0),
        ("gemma2", {"attn_logit_softcapping": ..., "final_logit_softcapping": None}, "logit_cap", None),
        ("gemma2", {"final_logit_softcapping": ...}, "logit_cap", 30.0),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "score_cap", None),  # which its class ignores
        ("gemma3", {"layer_types": ..., "sliding_window_pattern": ...}, "windows", (8,) * 5 + (0,)),
        ("exaone4", {"layer_types": ..., "sliding_window_pattern": "LLLG"}, "windows", (8, 8, 8, 0, 8)),
        ("exaone4", {"layer_types": ..., "sliding_window": None}, "rope_of_layer", ()),
        ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": 2}, "rope_of_layer", (0, 1, 0, 1, 0)),
        (
            "smollm3", {"layer_types": ..., "use_sliding_window": True, "sliding_window": 9},
            "windows", (0, 0, 0, 9, 0),
        ),
        ("granite4_dense", {"position_embedding_type": None}, "ropes", (None,)),
        ("granite_hybrid", {"position_embedding_type": "rope"}, "ropes", (Rope(theta=100.0),)),
        ("granite_hybrid", {"num_local_experts": ..., "mamba_d_state": ...}, "mixers", (Mamba(8, 8, 1, 256), ATTENTION, *[Mamba(8, 8, 1, 256)] * 2)),
        ("nemotron_h", {"moe_latent_size": 4, "norm_topk_prob": False}, "mlps", (
            None, Gated(24), None, None, None, Experts(8, 2, normalize=False, shared_dim=20, sigmoid=True, choice_bias=True, scale=1.5, latent=4),
        )),
        ("nemotron_h", {"num_hidden_layers": 3, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 5.0}, "layers", 6),
        ("nemotron_h", {"layer_norm_epsilon": ..., "norm_eps": 0.5}, "norm_eps", 1e-5),
        ("ministral3", rope("ministral3", max_position_embeddings=99, llama_4_scaling_beta=None), "query_growth", None),
        # 0.1 ln(16) + 1 is both the numerator (mscale) and the denominator (mscale_all_dim) of the attention factor.
        ("ministral3", {"rope_parameters": ...}, "ropes", (Rope(theta=1e6, scaling=MINISTRAL),)),
        ("ministral3", {"rope_parameters": ..., "rope_theta": 5.0}, "query_growth", (0.1, 16_384)),
        ("gemma3", {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_theta": ...}, "ropes", (Rope(theta=1e6), Rope())),
        ("exaone4", {"layer_types": ["full_attention"] * 5}, "rope_of_layer", (1,) * 5),  # no layer is rotated
        ("exaone4", {"num_attention_heads": 64, "num_key_value_heads": ..., "head_dim": 4}, "kv_heads", 32),
        ("gemma2", {"tie_word_embeddings": ...}, "tied_embeddings", True),
        ("mistral", {"tie_word_embeddings": ...}, "tied_embeddings", False),
        ("olmo2", {"rms_norm_eps": ...}, "norm_eps", 1e-5),
        ("seed_oss", {"attention_bias": ...}, "qkv_bias", True),
        ("glm4", {"attention_bias": ...}, "qkv_bias", True),
        ("ernie4_5", {"use_bias": True}, "mlp_bias", True),
        ("gemma3_wrapped", inside(num_attention_heads=..., head_dim=None), "head_dim", 256),
        ("gemma4_dense", {"hidden_size_per_layer_input": ..., "vocab_size_per_layer_input": 144}, "layer_embed_dim", 256),
        ("gemma4_dense", {"layer_types": ..., "per_layer_config": ...}, "windows", (6,) * 5 + (0,)),
        ("gemma4_dense", {"sliding_window": ...}, "windows", (512, 512, 0) * 2),
        ("gemma4_dense", {**UNIFIED, "sliding_window": ...}, "windows", (1024, 1024, 0) * 2),
        ("gemma4_dense", {**UNIFIED, "hidden_size_per_layer_input": ...}, "layer_embed_dim", 0),
        ("gemma4_dense", {"final_logit_softcapping": None}, "logit_cap", None),
        ("gemma4_dense", {"per_layer_config": ...}, "ropes", (replace(FULL, head_dim=512), Rope(theta=60.0))),
        ("gemma4_dense", {"rope_parameters": ...}, "ropes", (replace(FULL, theta=1e6), Rope())),
    ],
)  # fmt: skip
def test_absent_and_null_mean_what_they_mean_in_transformers(name, changes, field, value):
    described = golden(name, changes)
    if "text_config" in described:
        described["text_config"] = without(described["text_config"], "num_attention_heads")
    found = understand(described, "config.json")
    assert getattr(found, field) == value
    assert understand(describe(found), "config.json") == found


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; .* positive int"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, r"attn_logit_softcapping is -1\.0; .* positive float"),
        ("gemma2", {"final_logit_softcapping": 0}, r"final_logit_softcapping is 0"),
        ("gemma2", {"layer_types": ["full_attention"]}, r"layer_types=.* num_hidden_layers=5"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 5}, "layer_types has 'chunked_attention'"),
        ("gemma2", {"sliding_window": None}, "layer_types has 'sliding_attention', .* sliding_window is null"),
        ("gemma2", {"hidden_activation": "quick_gelu"}, "hidden_activation='quick_gelu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"rope_parameters": {"full_attention": {}, "chunked_attention": {}}}, r"rope_parameters .*chunked_attention"),
        ("gemma3", {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar is 'x'"),
        ("gemma3_wrapped", inside(model_type="gemma2"), r"text_config of model_type 'gemma2' is not supported \(only gemma3_text\)"),
        ("gemma4_e", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_e", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input=100 must be vocab_size=144"),
        ("gemma4_e", {"vocab_size_per_layer_input": ...}, "vocab_size_per_layer_input=262144 must be vocab_size=144"),
        ("gemma4_e", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ("gemma4_e", {"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 leaves no layer 'full_attention'"),
        ("gemma4_e", {"num_kv_shared_layers": 9}, "num_kv_shared_layers=9 leaves no layer"),
        ("gemma4_e", {"layer_types": ["full_attention"] * 6 + ["sliding_attention"]}, "layer_types ends with 'sliding_attention'"),
        ("gemma4_e", {"per_layer_config": {"0": {"head_dim": 4}}}, r"per_layer_config has {'head_dim': 4} for layer 0"),
        ("gemma4_e", {"per_layer_config": {"3": {"head_dim": 16}}}, r"per_layer_config has {} for layer 6"),
        ("gemma4_e", {"attention_bias": True}, "attention_bias=True"),
        ("gemma4_e", full_rope(factor=2.0), "factor=2.0 with rope_type 'proportional'"),
        ("gemma4_dense", {"per_layer_config": ..., "num_global_key_value_heads": 3}, "num_key_value_heads=3 .* must divide"),
        ("gemma4_moe", {"num_experts": None}, "num_experts is None"),
        ("gemma3_wrapped", {"text_config": None}, "text_config of model_type None"),
        ("gemma3_wrapped", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers=.* num_hidden_layers=5"),
        ("smollm3", {"no_rope_layers": [1, 1, 2, 0, 1]}, "no_rope_layers has 2"),
        ("phi3", rope("phi3", short_factor=[1.0]), "short_factor has 1 .* 6 pairs"),
        ("glm4", rope("glm4", partial_rotary_factor=0.7), "partial_rotary_factor=0.7 = 11 must be even"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LGLG"}, "sliding_window_pattern is 'LGLG'"),
        ("granite4_dense", {"num_local_experts": -1}, "num_local_experts is -1"),
        ("granite_hybrid", {"layer_types": ...}, "at least one layer with attention"),
        ("granite_hybrid", {"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
        ("granite_hybrid", {"mamba_proj_bias": True}, "mamba_proj_bias=True"),
        ("granite_hybrid", {"mamba_conv_bias": False}, "mamba_conv_bias=False"),
        ("granite_hybrid", {"mamba_n_heads": 7, "mamba_d_head": "auto"}, "mamba_n_heads=7 .* mamba_expand x hidden_size = 64"),
        ("granite_hybrid", {"mamba_d_head": 16}, "mamba_d_head=16 .* = 64"),
        ("granite_hybrid", {"mamba_n_groups": 3}, "3 groups .* must divide its 8 heads"),
        ("granite_hybrid", {"time_step_limit": [0.0, 1.0]}, r"time_step_limit=\[0\.0, 1\.0\]"),
        ("granite_hybrid", {"attention_bias": True}, "attention_bias=True"),
        ("nemotron_h", {"use_bias": True}, "use_bias=True"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias=True"),
        ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias=False"),
        ("nemotron_h", {"sliding_window": 8}, "sliding_window=8"),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, "mlp_hidden_act='gelu'"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ("nemotron_h", {"n_groups": 3}, "3 groups .* must divide its 4 heads"),
        ("nemotron_h", {"n_group": 3}, "n_group=3 must divide the 8 experts"),
        ("nemotron_h", {"layers_block_type": ["mamba", "rnn"]}, "layers_block_type has 'rnn'"),
        ("nemotron_h", {"layers_block_type": ..., "hybrid_override_pattern": "M|*"}, r"hybrid_override_pattern has '\|'"),
        ("nemotron_h", {"layers_block_type": ...}, "lacks the key 'layers_block_type' or 'hybrid_override_pattern'"),
        ("hunyuan_dense", rope("hunyuan_dense", alpha=None), "lacks the key 'alpha'"),
        ("deepseek_v3", {"intermediate_size": ...}, "lacks the key 'intermediate_size'"),
        ("mistral", {"attention_multiplier": 0.2}, "attention_multiplier=0.2"),
        ("mistral", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("mistral", {"num_experts": 8}, "num_experts=8"),
        ("mistral", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 experts, but there are 8"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("qwen3_moe", {"num_experts": 16}, "num_experts=16 and num_local_experts=8 differ"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] .*only \[\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 .*only 1"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; .* true or false"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("olmoe", {"clip_qkv": -1.0}, r"clip_qkv is -1\.0; .* positive float"),
        ("olmoe", {"num_local_experts": 8}, "num_local_experts=8"),
        ("granitemoe", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("olmo2", {"sliding_window": 8}, "sliding_window=8"),
        ("olmo2", {"attention_bias": True}, "attention_bias=True"),
        ("ernie4_5", {"use_bias": 1}, "use_bias is 1; .* true or false"),
        ("mistral", {"model_type": ["mistral"]}, r"model_type \"\['mistral'\]\" is not one of llama"),
        ("mistral", {"model_type": ...}, "model_type 'None' is not one of llama"),
        ("mistral", {"architectures": [3]}, r"architectures \[3\]"),
        ("mistral", {"num_attention_heads": "4", "head_dim": ...}, "num_attention_heads is '4'"),
        ("mistral", {"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
        ("mistral", rope("mistral", rope_theta=-1.0), r"rope_theta is -1\.0; .* positive float"),
        ("mistral", rope("mistral", rope_type=["yarn"]), "rope_type .*yarn.* is not one of default, linear"),
        ("mistral", rope("mistral", rope_type="dynamic", factor=2.0), "rope_type 'dynamic' is not one of default, linear"),
        ("gemma2", {"layer_types": 5}, "layer_types has 5 "),
        ("gemma3", {"rope_parameters": {"full_attention": 3, "sliding_attention": {}}}, "rope_parameters is 3"),
        *((name, FLAT, r"rope_parameters has the keys \['rope_theta', 'rope_type'\]") for name in ("gemma3", "gemma4_e", "olmo3")),
        ("gemma4_e", full_rope(rope_theta=None), "rope_theta is None"),
        ("phi3", {LENGTH: ...}, f"{LENGTH} is 16 .* 4096 outside, where it is the default"),
        ("gemma3", {"rope_parameters": {"full_attention": {}}}, r"rope_parameters has the keys \['full_attention'\]"),
        ("phi3", rope("phi3", long_factor=None), "lacks the key 'long_factor', .* 'longrope'"),
        ("phi3", rope("phi3", long_factor=[0.0] * 6), r"long_factor is 0\.0; .* positive float"),
        ("phi3", rope("phi3", partial_rotary_factor=1.5), r"partial_rotary_factor is 1\.5; it must be at most 1"),
        ("phi3", rope("phi3", original_max_position_embeddings=0), "original_max_position_embeddings is 0"),
        ("ministral3", rope("ministral3", llama_4_scaling_beta="x"), "llama_4_scaling_beta is 'x'"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "layer_types must have .* at least one 'full_attention'"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 4}, "layer_types must have 'linear_attention'"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 must divide linear_num_value_heads=4"),
        ("qwen3_5", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ("qwen3_5", {"attn_output_gate": 1}, "attn_output_gate is 1; .* true or false"),
        ("mistral", {"layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention'"),
        ("mistral", {"attn_output_gate": True}, "attn_output_gate=True is not supported"),
        (
            "olmo3", {"rope_parameters": None, "rope_theta": 100.0},
            "rope_theta=100 does not determine .* rope_parameters",
        ),
    ],
)  # fmt: skip
def test_settings_that_no_switch_covers_are_refused_by_key(name, changes, message):
    with pytest.raises(ValueError, match=message):
        understand(golden(name, changes), "config.json")


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/config.json")), ids=lambda path: path.parent.name)
def test_every_family_can_be_written_and_read(path):
    config = understand(json.loads(path.read_text()), path)
    assert understand(describe(config), "config.json") == config
    short = config.for_length(8)
    assert (short == config) == (path.parent.name != "phi3")
    assert understand(describe(short), "config.json") == config


def sized(**values):
    return understand({"max_position_embeddings": 4096, "num_attention_heads": 32, **values}, "config.json")


def test_hybrids_of_released_sizes_have_the_published_numbers_of_parameters_and_compile_few_layers():
    """Nemotron 3 Nano 30B-A3B and Granite 4 H Small. An odd order of 52 layers compiles 14 of them."""
    nano = sized(
        model_type="nemotron_h",
        vocab_size=131_072,
        hidden_size=2688,
        num_key_value_heads=2,
        hybrid_override_pattern="MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME",
        mamba_num_heads=64,
        intermediate_size=1856,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128,
        num_experts_per_tok=6,
    )
    small = sized(
        model_type="granitemoehybrid",
        vocab_size=100_352,
        hidden_size=4096,
        num_hidden_layers=40,
        num_key_value_heads=8,
        num_local_experts=72,
        num_experts_per_tok=10,
        intermediate_size=768,
        shared_intermediate_size=1536,
        mamba_d_state=128,
        tie_word_embeddings=True,
        layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    )
    for decoder, total, active, state, layers, bodies in (
        (nano, 31.6, 3.6, 49.9, 6, 14),
        (small, 32.2, 8.8, 154.6, 4, 3),
    ):
        assert (round(decoder.parameters / 1e9, 1), round(decoder.active_parameters / 1e9, 1)) == (
            total,
            active,
        )
        assert (round(decoder.state_bytes / 1e6, 1), len(decoder.paged)) == (state, layers)
        assert sum(len(list(groupby(period))) for period, _ in decoder.periods) == bodies


def test_the_table_of_models_lists_every_family():
    page = (Path(__file__).parents[2] / "docs" / "bring_your_model.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[2] for line in page.splitlines() if line.startswith("| ") and line.count("|") == 5
    ]
    listed = {name for row in rows for name in re.findall("`(.*?)`", row)} - {"model_type"}
    assert listed == {*FAMILIES, *WRAPPED}


def test_two_notations_that_contradict_each_other_are_refused():
    """Such as a scaling in the older notation that was added to a file in the newer one."""
    described = describe(QWEN2) | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(ValueError, match=r"rope_parameters .*default.* and rope_scaling .*yarn"):
        understand(described, "config.json")
    length = (
        "original_max_position_embeddings"  # transformers 4 reads the inner one, transformers 5 the outer one
    )
    described = without(described, "rope_parameters") | {length: 32}
    described["rope_scaling"] = described["rope_scaling"] | {length: 16}
    with pytest.raises(ValueError, match=f"{length} is 16 .* 32 "):
        understand(described, "config.json")


def test_a_decoder_of_no_family_cannot_be_written():
    with pytest.raises(ValueError, match=r"qwen2 .*qk_norm"):
        describe(replace(QWEN2, qk_norm="head"))


@pytest.mark.parametrize(
    ("inside", "outside", "tied"),
    [(False, True, False), (True, False, True), (None, True, True), (..., False, False)],
)
def test_keys_outside_text_config_only_complete_it(inside, outside, tied):
    """transformers writes the default tie_word_embeddings=true of Mistral3Config, whatever the text model is."""
    text = {**without(json.loads((GOLDEN / "mistral" / "config.json").read_text()), "tie_word_embeddings")}
    text |= {} if inside is ... else {"tie_word_embeddings": inside}
    described = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": outside}
    found = understand(described, "config.json")
    assert (found.tied_embeddings, found.wrapped) == (tied, True)
    assert found == replace(understand(text, "config.json"), tied_embeddings=tied)
    assert not understand(text, "config.json").wrapped
