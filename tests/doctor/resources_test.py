"""What the check of the model reports about models whose description has a choice or a part that is not used."""

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dapo_jax.config import DataConfig, ModelConfig, OverlongConfig, RewardConfig, SamplingConfig, TrainConfig
from dapo_jax.doctor.resources import model
from dapo_jax.doctor.subject import Subject
from dapo_jax.models.folder import load_model
from dapo_jax.text.tokenizers import CharTokenizer, save_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "families"


def reported(folder, name, *, response_tokens=6):
    shutil.copytree(GOLDEN / name, folder)
    save_tokenizer(CharTokenizer("0123456789"), folder)
    config = TrainConfig(
        run_dir="out",
        model=ModelConfig(source=str(folder)),
        data=DataConfig(max_prompt_tokens=4),
        sampling=SamplingConfig(max_response_tokens=response_tokens),
        reward=RewardConfig(overlong=OverlongConfig(enabled=False)),
    )
    return model(Subject(config)).message


@pytest.mark.parametrize(("response_tokens", "chosen"), [(12, "short_factor"), (13, "long_factor")])
def test_the_factors_of_longrope_are_reported(tmp_path, response_tokens, chosen):
    """The golden model was first trained on 16 tokens."""
    message = reported(tmp_path / "model", "phi3", response_tokens=response_tokens)
    assert f"RoPE uses {chosen}" in message
    assert "original_max_position_embeddings=16" in message


def test_tensors_that_are_not_loaded_are_counted_wherever_the_model_is_read(tmp_path):
    names = load_file(GOLDEN / "gemma3_wrapped" / "model.safetensors")
    count = sum(not name.startswith("language_model.") for name in names)
    told = f"{count} tensors of the image encoder or of additional heads are not loaded"
    assert told in reported(tmp_path / "model", "gemma3_wrapped")
    with pytest.warns(UserWarning, match=told):
        load_model(tmp_path / "model")
