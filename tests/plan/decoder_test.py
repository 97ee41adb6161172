"""Sizes of models without their weights."""

import shutil
from pathlib import Path

import pytest

from dapo_jax.config import ConfigError, ModelConfig
from dapo_jax.models.presets import PRESETS
from dapo_jax.plan.decoder import decoder_of


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("hf:Qwen/Qwen3-0.6B-Base", "qwen3-0.6b"),
        ("hf:meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("hf:HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("hf:google/gemma-3-1b-it", "gemma-3-1b"),
        ("hf:Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("hf:Qwen/Qwen3.5-0.8B", "qwen3.5-0.8b"),
        ("hf:Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b"),
        ("hf:openai/gpt-oss-20b", "gpt-oss-20b"),
        ("preset:qwen2.5-32b", "qwen2.5-32b"),
    ],
)
def test_known_models_are_found_without_the_hub(source, known):
    """The vocabulary is the embedding's, also for a preset, which has its tokenizer's vocabulary in a run."""
    assert decoder_of(ModelConfig(source=source)) == PRESETS[known]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:Qwen/Qwen2.5-7C", r"qwen/qwen2\.5-7b.*folder"),
        ("hf:mistralai/Mistral-7B-v0.3", r"\(llama, qwen2, qwen3, mistral, "),
    ],
)
def test_an_unknown_repository_is_answered_with_the_nearest_and_the_families(source, message):
    with pytest.raises(ConfigError, match=message):
        decoder_of(ModelConfig(source=source))


def test_a_folder_needs_only_its_config(tmp_path):
    shutil.copy(Path(__file__).parents[1] / "golden" / "qwen3" / "config.json", tmp_path)
    assert decoder_of(ModelConfig(source=str(tmp_path))).vocab_size == 48
