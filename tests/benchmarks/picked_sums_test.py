"""The task of the second study: its grader reads the answer, and its base model has its characters."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.study import picked_sums
from benchmarks.study.ladder import PICKED_SUMS
from dapo_jax.config import SftConfig, load_config


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("0+a3>3,B-,3+c5d9>7,=7", True),
        ("=7", True),  # the answer at once
        ("0+a3>4,4+c5>9,=7", True),  # steps are not graded
        ("0+a3>3,3+c5>8,=8", False),  # forgets a digit
        ("0+a3>3,B-,3+c5d9>7,", False),  # truncated
        ("=7,=7", False),
        ("=77", False),
        ("", False),
    ],
)
def test_a_response_is_correct_if_it_ends_in_the_answer(response, correct):
    entries = ("a3", "B8", "c5", "d9")
    prompt = SimpleNamespace(answer=picked_sums.answer(entries))
    assert picked_sums.right(SimpleNamespace(prompt=prompt, response=response)) == correct


def test_the_base_model_of_picked_sums_is_shipped_with_the_characters_of_the_task():
    tokenizer = json.loads((PICKED_SUMS.base_model / "tokenizer.json").read_text())
    assert tokenizer["alphabet"] == picked_sums.ALPHABET
    assert (
        load_config(PICKED_SUMS.base_model_config, schema=SftConfig).model.tokenizer
        == f"char:{picked_sums.ALPHABET}"
    )
    assert (PICKED_SUMS.base_model / "model.safetensors").stat().st_size < 3e6
