"""The task of the second study: its questions can be solved, its splits share none, and its grader checks operations."""

import itertools
import json
from types import SimpleNamespace

import pytest

from benchmarks.study import search_task
from benchmarks.study.search_task import (
    ALPHABET,
    DIGITS,
    LONGEST,
    attempt,
    demonstration,
    questions,
    rows,
    solved,
    total,
    write,
)


def graded(prompt, response):
    return solved(SimpleNamespace(prompt=SimpleNamespace(text=prompt), response=response))


@pytest.mark.parametrize("count", DIGITS)
def test_operations_reach_the_target_and_the_grader_agrees(count):
    digits, target = next(questions(count))
    prompt = rows("test", digits, target)["prompt"]
    tried = ["".join(operations) for operations in itertools.product("+-*", repeat=count - 1)]
    right = [operations for operations in tried if total(digits, operations) == target]
    assert 0 < len(right) < len(tried)
    for operations in tried:
        assert graded(prompt, attempt(digits, target, operations) + "=") == (operations in right)


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("b*2c+7>0=", True),  # 3 * 8 = 24 is 2, and 2 + 5 is 7
        ("b+0c+5>9?b*2c+7>0=", True),  # only the last attempt counts
        ("b*2c+7>0?b+0c+5>9=", False),
        ("b*2c+7>0", False),  # without an end
        ("b*2c+7>0=7", False),
        ("b*2c+7=", False),  # without the distance
        ("b*2>0=", False),  # a digit is missing
        ("c+8b*2>0=", False),  # wrong order
        ("b*2c+7d+7>0=", False),  # there is no fourth digit
        ("b*3c+8>0=", True),  # false results are not checked, and mislead only the policy
        ("=", False),
        ("", False),
    ],
)
def test_a_response_is_correct_if_its_last_attempt_is(response, correct):
    assert graded("a3b8c5>7", response) == correct


def test_demonstrations_are_written_with_the_alphabet_and_end():
    made = [
        demonstration(*question, draw)
        for count in DIGITS
        for question in itertools.islice(questions(count), 100)
        for draw in range(2)
    ]
    assert set("".join(made)) <= set(ALPHABET)
    assert all(text.endswith("=") and len(text) <= LONGEST for text in made)
    last = [text[:-1].split("?")[-2:] for text in made]
    repeated = sum(len(pair) == 2 and pair[0] == pair[1] for pair in last) / len(made)
    # 8% repeat on purpose. In other demonstrations, at most 0.46^3 + ... = 10% of attempts with three operations equal the previous one.
    assert 0.05 < repeated < 0.15


def test_no_two_splits_share_a_question(tmp_path, monkeypatch):
    monkeypatch.setattr(search_task, "QUESTIONS", {"warm_start": 30, "train": 20, "test": 10})
    write(tmp_path)
    paths = [tmp_path / "warm_start/train.jsonl", *sorted((tmp_path / "questions").iterdir())]
    prompts = [[json.loads(line)["prompt"] for line in path.read_text().splitlines()] for path in paths]
    assert [len(split) for split in prompts] == [30 * 5, 10 * 5, 20 * 5]
    assert len(set(itertools.chain(*prompts))) == 60 * 5
