"""config.json: both notations of rotary scaling, keys that older files lack, and unsupported keys."""

from dataclasses import replace

import pytest

from dapo_jax.models.families import describe, understand
from dapo_jax.models.presets import PRESETS, preset
from dapo_jax.models.rope import RopeScaling
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
QWEN2 = tiny_decoder_config(qkv_bias=True)


def without(described, *keys):
    return {key: value for key, value in described.items() if key not in keys}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("absent", [(), ("rope_theta", "rope_scaling"), ("rope_parameters",)])
def test_a_scaling_is_read_from_either_notation(scaling, absent):
    config = tiny_decoder_config(rope_scaling=SCALINGS[scaling], rope_theta=5e5)
    assert understand(without(describe(config), *absent), "config.json") == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_written_and_read(name):
    assert understand(describe(preset(name)), "config.json") == preset(name)


def test_the_old_and_the_new_name_of_the_kind_are_understood():
    described = without(describe(QWEN2), "rope_parameters")
    for names in ({"type": "linear"}, {"type": "linear", "rope_type": "linear"}):
        config = understand({**described, "rope_scaling": {**names, "factor": 2}}, "config.json")
        assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_the_original_context_of_a_scaling_may_be_outside_of_it():
    """As transformers does: max_position_embeddings (64 here), unless there is a key of the name at the top."""
    described = without(describe(QWEN2), "rope_parameters") | {
        "rope_scaling": {"type": "yarn", "factor": 4.0}
    }
    assert understand(described, "config.json").rope_scaling.original_max_positions == 64
    described["original_max_position_embeddings"] = 32
    assert understand(described, "config.json").rope_scaling.original_max_positions == 32


def test_keys_that_older_files_lack_have_the_defaults_of_transformers():
    described = describe(tiny_decoder_config(kv_heads=4, rope_theta=10_000.0, tied_embeddings=False))
    older = without(
        described, "num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "tie_word_embeddings"
    )
    assert understand(older, "config.json") == understand(described, "config.json")
    qwen3 = describe(tiny_decoder_config(qk_norm=True, head_dim=128))
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
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type 'longrope'.* default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "lacks the key 'factor', .* 'linear'"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, r"mrope_section=\[1\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": False}}, "truncate=False .* 'yarn'"),
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


def test_two_notations_that_contradict_each_other_are_refused():
    """Such as a scaling in the older notation that was added to a file in the newer one."""
    described = describe(QWEN2) | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(ValueError, match=r"rope_parameters .*default.* and rope_scaling .*yarn"):
        understand(described, "config.json")


def test_a_decoder_of_no_family_cannot_be_written():
    with pytest.raises(ValueError, match=r"qkv_bias .*qk_norm"):
        describe(replace(QWEN2, qk_norm=True))
