"""The task of the second study: its demonstrations add up, its splits share no question, and its grader reads the answer."""

import json
import re
from types import SimpleNamespace

import pytest

from benchmarks.study import picked_sums
from benchmarks.study.ladder import PICKED_SUMS
from dapo_jax.config import SftConfig, load_config


def read_jsonl(path):
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


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


def test_demonstrations_of_picked_sums_are_wrong_only_if_they_forget_a_digit(monkeypatch, tmp_path):
    """A demonstration that adds each digit that counts exactly once must be correct. Repeated steps do not change the answer."""
    monkeypatch.setattr(picked_sums, "QUESTIONS", {"warm_start": 40, "train": 20, "test": 5})
    picked_sums.write(tmp_path)
    splits = [
        read_jsonl(tmp_path / name) for name in ("warm_start/train", "questions/train", "questions/test")
    ]
    assert [len(rows) for rows in splits] == [200, 100, 25]
    prompts = [row["prompt"] for rows in splits for row in rows]
    assert len(set(prompts)) == len(prompts)
    forgetful, longest = 0, load_config(PICKED_SUMS.base_model_config, schema=SftConfig).max_response_tokens
    for row in splits[0]:
        counted = re.findall(r"[a-x]\d", row["prompt"])
        assert row["answer"] == str(sum(int(entry[1]) for entry in counted) % 10)
        for response in row["responses"]:
            assert set(response) <= set(picked_sums.ALPHABET)
            assert len(response) < longest
            named = set(re.findall(r"[a-x]\d", response))
            assert named <= set(counted)
            if named == set(counted) or response == f"={row['answer']}":
                assert response.endswith(f"={row['answer']}")
            else:
                assert len(counted) - len(named) == 1
                forgetful += 1
    # A demonstration forgets its last digit with probability 0.9 x 0.15, which counts with probability 2/3 or more: 36 of 400 or more.
    assert 20 <= forgetful <= 70


def test_the_base_model_of_picked_sums_is_shipped_with_the_characters_of_the_task():
    tokenizer = json.loads((PICKED_SUMS.base_model / "tokenizer.json").read_text())
    assert tokenizer["alphabet"] == picked_sums.ALPHABET
    assert (
        load_config(PICKED_SUMS.base_model_config, schema=SftConfig).model.tokenizer
        == f"char:{picked_sums.ALPHABET}"
    )
    assert (PICKED_SUMS.base_model / "model.safetensors").stat().st_size < 3e6
