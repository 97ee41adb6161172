"""Problems on file say what an evaluation's numbers came from."""

import json
import os

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.evaluation import problem_record
from dapo_jax.trackers.rollout_log import read_problems, read_rollouts, write_problems, write_rollouts


def group(ordinal=7, row=None):
    """Two responses: one right, one cut off without an answer."""
    prompt = Prompt(
        ordinal=ordinal, tokens=np.array([1, 2], np.int32), text="12+22\n=", answer="34", row=row or {}
    )
    rollouts = tuple(
        Rollout(
            response=Response(
                tokens=np.ones(length, np.int32),
                logprobs=np.zeros(length, np.float32),
                finish_reason=finish_reason,
            ),
            text="",
            verdict=Verdict(correct=extracted == "34", extracted=extracted),
            reward=0.0,
        )
        for extracted, length, finish_reason in (("34", 2, "stop"), (None, 5, "length"))
    )
    return Group(prompt=prompt, rollouts=rollouts)


def test_every_problem_is_one_line_with_all_that_is_known(tmp_path):
    """One of two right: avg 1/2, pass@2 1; the only vote is right."""
    problems = [problem_record(group(row={"source_row": "own.jsonl, line 3"})), problem_record(group(8))]
    path = write_problems(tmp_path / "step_000010", problems, name="arithmetic", step=10)
    assert path == tmp_path / "step_000010" / "arithmetic.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "schema_version": 1,
        "step": 10,
        "dataset": "arithmetic",
        "ordinal": 7,
        "place": "own.jsonl, line 3",
        "prompt": "12+22\n=",
        "answer": "34",
        "samples": 2,
        "correct": 1,
        "avg@2": 0.5,
        "pass@2": 1.0,
        "cons@2": 1.0,
        "reward": 0.0,
        "consensus_answers": ["34"],
        "extracted": [
            {"answer": "34", "count": 1, "correct": 1},
            {"answer": None, "count": 1, "correct": 0},
        ],
        "response_tokens": 3.5,
        "truncated": 1,
        "lost": 0,
        "responses": [],
    }
    assert (second["ordinal"], second["place"]) == (8, None)
    assert read_problems(path) == [first, second]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gsm8k-v1.0_a", "gsm8k-v1.0_a.jsonl"),
        ("hf:org/set", "hf%3Aorg%2Fset.jsonl"),
        ("hf_org_set", "hf_org_set.jsonl"),
        ("../up", "..%2Fup.jsonl"),
        ("two words", "two%20words.jsonl"),
    ],
)
def test_a_dataset_of_any_name_gets_a_file_of_its_own_in_the_folder(tmp_path, name, file):
    path = write_problems(tmp_path, [problem_record(group())], name=name, step=0)
    assert [found.name for found in tmp_path.iterdir()] == [path.name] == [file]
    assert read_problems(path)[0]["dataset"] == name


def test_writing_an_evaluation_again_replaces_it_whole(tmp_path, monkeypatch):
    two = [problem_record(group()), problem_record(group(8))]
    path = write_problems(tmp_path, two, name="a", step=1)
    before = path.read_bytes()

    def full(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(
            OSError, match=r"cannot write the problems of an evaluation .*No space left.*a\.jsonl"
        ):
            write_problems(tmp_path, two[:1], name="a", step=1)
    assert path.read_bytes() == before
    assert len(read_problems(write_problems(tmp_path, two[:1], name="a", step=1))) == 1


def test_problems_and_rollouts_are_not_taken_for_each_other(tmp_path):
    problems = write_problems(tmp_path, [problem_record(group())], name="a", step=1)
    rollouts = write_rollouts(tmp_path, 1, [group()])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 is not a rollout"):
        read_rollouts(problems)
    with pytest.raises(ValueError, match=r"step_000001\.jsonl, line 1 is not a problem"):
        read_problems(rollouts)


@pytest.mark.parametrize(
    ("line", "message"), [('{"schema_version": 2}', "has schema_version 2"), ("x", "is not a problem")]
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, message):
    path = write_problems(tmp_path, [problem_record(group())], name="a", step=1)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2 {message}"):
        read_problems(path)
