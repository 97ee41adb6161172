"""Sizes of models without their weights."""

import json
import sys

import pytest

from dapo_jax.cli import main
from dapo_jax.config import ConfigError, ModelConfig
from dapo_jax.models.presets import PRESETS
from dapo_jax.plan.sizes import decoder_of


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("hf:Qwen/Qwen2.5-32B", "qwen2.5-32b"),
        ("hf:Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("hf:Qwen/Qwen3-0.6B-Base", "qwen3-0.6b"),
        ("hf:meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("hf:HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("preset:qwen2.5-32b", "qwen2.5-32b"),
    ],
)
def test_known_models_are_found_without_the_hub(source, known):
    """The vocabulary is the embedding's, also of a preset, which takes its tokenizer's in a run."""
    assert decoder_of(ModelConfig(source=source)) == PRESETS[known]


def test_an_unknown_repository_is_answered_with_the_nearest_and_fetches_nothing():
    with pytest.raises(ConfigError, match=r"nearest that is known is qwen/qwen2\.5-7b.*folder"):
        decoder_of(ModelConfig(source="hf:Qwen/Qwen2.5-7C"))


def test_a_folder_needs_only_its_config(tmp_path):
    described = {
        "model_type": "qwen3", "vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert decoder_of(ModelConfig(source=str(tmp_path))).vocab_size == 96


@pytest.mark.parametrize("options", [[], ["--sweep"]])
def test_an_architecture_that_is_not_covered_is_named_before_anything_else(
    options, tmp_path, capsys, monkeypatch
):
    """Also where the mesh would not fit the devices, and where there is no libtpu."""
    described = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    monkeypatch.setitem(sys.modules, "libtpu", None)
    arguments = [f"model.source={tmp_path}", "parallel.fsdp=3", "--topology", "v5p:4x4x8", *options]
    assert main(["plan", "configs/dapo_qwen2.5_32b.yaml", *arguments]) == 2
    said = capsys.readouterr().err
    assert (
        "model_type 'mistral' is not covered; llama, qwen2 and qwen3 are; its architecture is MistralForCausalLM"
        in said
    )


def test_a_repository_that_is_not_known_is_told_which_families_are_covered():
    with pytest.raises(ConfigError, match=r"a family that is covered \(llama, qwen2, qwen3\)"):
        decoder_of(ModelConfig(source="hf:mistralai/Mistral-7B-v0.3"))
