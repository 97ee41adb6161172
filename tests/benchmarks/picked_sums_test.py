"""The base model of the second study has the characters of its task."""

from benchmarks.study import picked_sums
from benchmarks.study.ladder import PICKED_SUMS
from dapo_jax.config import SftConfig, load_config
from dapo_jax.text.tokenizers import load_tokenizer


def test_the_base_model_of_picked_sums_is_shipped_with_the_characters_of_the_task():
    text = picked_sums.ALPHABET
    tokenizer = load_tokenizer(PICKED_SUMS.base_model)
    assert tokenizer.encode(text).tolist() == list(range(2, 2 + len(text)))  # after padding and the end
    assert load_config(PICKED_SUMS.base_model_config, schema=SftConfig).model.tokenizer == f"char:{text}"
    assert (PICKED_SUMS.base_model / "model.safetensors").stat().st_size < 3e6
