"""The task of the second study: its grader reads the answer, and its base model has its characters."""

import json

from benchmarks.study import picked_sums
from benchmarks.study.ladder import PICKED_SUMS
from dapo_jax.config import SftConfig, load_config


def test_the_base_model_of_picked_sums_is_shipped_with_the_characters_of_the_task():
    tokenizer = json.loads((PICKED_SUMS.base_model / "tokenizer.json").read_text())
    assert tokenizer["alphabet"] == picked_sums.ALPHABET
    assert (
        load_config(PICKED_SUMS.base_model_config, schema=SftConfig).model.tokenizer
        == f"char:{picked_sums.ALPHABET}"
    )
    assert (PICKED_SUMS.base_model / "model.safetensors").stat().st_size < 3e6
