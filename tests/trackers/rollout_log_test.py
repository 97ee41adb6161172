"""The readable records of a run: rollouts, problems of an evaluation, post-mortems."""

import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Span, TurnSpan, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.evaluation import problem_record
from dapo_jax.rewards.grading import NOT_GRADED
from dapo_jax.storage import path_of
from dapo_jax.trackers.rollout_log import (
    format_rollouts,
    read_post_mortem,
    read_problems,
    read_rollouts,
    write_post_mortem,
    write_problems,
    write_rollouts,
)


def rollout(text, *, correct, penalty=0.0, finish_reason="stop", extracted="34", logprobs=(-0.5, -0.1234567)):
    return Rollout(
        response=Response(
            record=Tokens(
                np.arange(len(logprobs), dtype=np.int32) + 5, logprobs=np.array(logprobs, np.float32)
            ),
            finish_reason=finish_reason,
        ),
        text=text,
        verdict=Verdict(
            correct=correct, extracted=extracted, reason="equal to the answer" if correct else ""
        ),
        reward=(1.0 if correct else -1.0) + penalty,
        overlong_penalty=penalty,
    )


def group(ordinal=7, row=None):
    return Group(
        prompt=Prompt(
            ordinal=ordinal, tokens=np.array([1, 2], np.int32), text="12+22\n=", answer="34", row=row or {}
        ),
        rollouts=(
            rollout("34", correct=True),
            rollout("35?", correct=False, penalty=-0.25, finish_reason="length", extracted=None),
        ),
    )


def test_every_rollout_is_one_complete_line(tmp_path):
    path = write_rollouts(tmp_path / "rollouts", 10, [group()], advantages=np.array([[0.75, -0.75]]))
    assert path == tmp_path / "rollouts" / "step_000010.jsonl"
    right, wrong = (json.loads(line) for line in path.read_text().splitlines())
    assert right == {
        "schema_version": 1,
        "step": 10,
        "ordinal": 7,
        "index": 0,
        "prompt": "12+22\n=",
        "answer": "34",
        "response": "34",
        "correct": True,
        "extracted": "34",
        "reason": "equal to the answer",
        "score": None,
        "reward": 1.0,
        "overlong_penalty": 0.0,
        "response_tokens": 2,
        "finish_reason": "stop",
        "spans": [[0, 0]],
        "row": {},
        "prompt_token_ids": [1, 2],
        "response_token_ids": [5, 6],
        "logprobs": [-0.5, -0.123457],
        "in_loss": None,
        "ratios": None,
        "advantage": 0.75,
    }
    assert (wrong["index"], wrong["correct"], wrong["reward"], wrong["advantage"]) == (1, False, -1.25, -0.75)
    assert (wrong["extracted"], wrong["finish_reason"], wrong["overlong_penalty"]) == (None, "length", -0.25)
    assert read_rollouts(path) == [right, wrong]


def test_spans_give_the_first_token_of_each_version(tmp_path):
    first, second = group().rollouts
    spans = (Span(0, 7), Span(1, 9))
    in_flight = replace(first, response=replace(first.response, spans=spans))
    rows = read_rollouts(write_rollouts(tmp_path, 10, [replace(group(), rollouts=(in_flight, second))]))
    assert [row["spans"] for row in rows] == [[[0, 7], [1, 9]], [[0, 0]]]


def test_ratios_and_in_loss_distinguish_trained_rollouts(tmp_path):
    ratios = {(7, 0): np.array([1.0, 1.2345678]), (7, 1): None}
    rows = read_rollouts(write_rollouts(tmp_path, 1, [group(), group(8)], ratios=ratios))
    assert [(row["in_loss"], row["ratios"]) for row in rows] == [
        (True, [1.0, 1.234568]),
        (False, None),
        (None, None),
        (None, None),
    ]


def test_advantages_are_optional_and_must_fit(tmp_path):
    path = write_rollouts(tmp_path, 1, [group()])
    assert [row["advantage"] for row in read_rollouts(path)] == [None, None]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        write_rollouts(tmp_path, 1, [group(), group(8)], advantages=np.zeros(3))


def test_any_row_and_response_become_valid_lines(tmp_path):
    row = {
        "level": np.int64(3),
        "vector": np.zeros(2),
        "raw": b"\xff",
        "where": tmp_path,
        "nested": {"x": (1, 2)},
    }
    odd = "line separator \u2028, lone surrogate \ud800, \u00e9\n\x00"
    sampled = Group(
        prompt=group(row=row).prompt, rollouts=(rollout(odd, correct=False, logprobs=(-math.inf, math.nan)),)
    )
    (found,) = read_rollouts(write_rollouts(tmp_path, 1, [sampled]))
    assert found["logprobs"] == [None, None]
    assert found["response"] == odd.replace("\ud800", "?")
    plain = {
        "level": 3,
        "vector": [0.0, 0.0],
        "raw": "\ufffd",
        "where": str(tmp_path),
        "nested": {"x": [1, 2]},
    }
    assert found["row"] == plain


def test_writing_a_step_again_replaces_it_whole(tmp_path, monkeypatch):
    path = write_rollouts(tmp_path, 1, [group(), group(8)])
    before = path.read_bytes()

    def full(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match=r"cannot write rollouts .*No space left.*step_000001\.jsonl"):
            write_rollouts(tmp_path, 1, [group()])
    assert path.read_bytes() == before
    assert len(read_rollouts(write_rollouts(tmp_path, 1, [group()]))) == 2


def test_the_text_view_shows_question_answer_and_verdicts():
    assert format_rollouts([group()]) == (
        "prompt 7: 1/2 correct, mean reward -0.125\n"
        "  12+22\n"
        "  =\n"
        "  answer: 34\n"
        "  [0] correct | reward +1 | 2 tokens | extracted '34' | equal to the answer\n"
        "      34\n"
        "  [1] wrong | reward -1.25 | overlong penalty -0.25 | 2 tokens, cut off | no answer found\n"
        "      35?\n"
    )
    # With `batch.keep`, an index is the place among all responses, as in the JSON lines.
    kept = format_rollouts([replace(group(), kept=(2, 5))])
    assert [line[:5] for line in kept.splitlines() if line.startswith("  [")] == ["  [2]", "  [5]"]


def test_the_text_view_of_scores_has_no_verdicts():
    scored = [
        replace(one, verdict=Verdict(correct=score > 0, score=score), reward=score)
        for one, score in zip(group().rollouts, (-0.25, 0.0015), strict=True)
    ]
    text = format_rollouts([replace(group(), rollouts=tuple(scored))], metric="score")
    assert text.startswith("prompt 7: mean reward -0.124\n")
    assert "  [0] score -0.25 | reward -0.25 | 2 tokens\n" in text
    assert "  [1] score +0.0015 | reward +0.0015 |" in text
    assert not re.search("correct|wrong|no answer", text)


@pytest.mark.parametrize("metric", ["correct", "score"])
def test_the_text_view_of_responses_that_were_not_graded_has_no_verdicts(metric):
    ungraded = [replace(one, verdict=NOT_GRADED, reward=0.0) for one in group().rollouts]
    text = format_rollouts([replace(group(), rollouts=tuple(ungraded))], metric=metric)
    assert text.splitlines()[0] == "prompt 7: not graded"
    assert "  [0] 2 tokens | not graded" in text.splitlines()
    assert not [word for word in ("correct", "wrong", "reward", "score", "no answer") if word in text]


def test_the_text_view_marks_the_lines_of_the_environment():
    """The environment wrote tokens 0 to 2 and 4; the policy tokens 3 and 5. Without turns, the text is as graded."""
    [one, other] = group().rollouts
    response = Response(
        record=Tokens(np.array(list(b"q\n:7>8"), np.int32)), finish_reason="stop",
        turns=(TurnSpan(3, 4), TurnSpan(5, 6)),
    )  # fmt: skip
    played = replace(group(), rollouts=(replace(one, response=response), other))
    text = format_rollouts([played], decode=lambda ids: bytes(ids.tolist()).decode())
    assert text.splitlines()[-7:-2] == ["      > q", "      > :", "      7", "      > >", "      8"]
    assert text.endswith("\n      35?\n")


def test_every_problem_is_one_complete_line(tmp_path):
    """One of two responses is correct: avg@2 is 1/2, pass@2 is 1, and the only vote is correct."""
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
        "reward": 0.0,  # without the overlong penalty
        "consensus_answers": ["34"],
        "extracted": [{"answer": "34", "count": 1, "correct": 1}, {"answer": None, "count": 1, "correct": 0}],
        "response_tokens": 2.0,
        "truncated": 1,
        "lost": 0,
        "responses": [],
    }
    assert (second["ordinal"], second["place"]) == (8, None)
    assert read_problems(path) == [first, second]


@pytest.mark.parametrize(
    ("name", "file"), [("hf:org/set", "hf%3Aorg%2Fset.jsonl"), ("../up", "..%2Fup.jsonl")]
)
def test_a_dataset_of_any_name_gets_its_own_file_in_the_folder(tmp_path, name, file):
    path = write_problems(tmp_path, [problem_record(group())], name=name, step=0)
    assert [found.name for found in tmp_path.iterdir()] == [path.name] == [file]
    assert read_problems(path)[0]["dataset"] == name


STACKS = [
    {"mask": np.array([[[True, False]]]), "advantages": np.array([[[np.nan, 0.0]]], np.float32)},
    {"tokens": np.arange(6, dtype=np.int32).reshape(3, 2, 1)[:2]},
]


def written(folder):
    report = {"step": 3, "update": 2, "nonfinite": {"loss": {"microbatches": [[0, 1]]}}}
    write_post_mortem(folder, report=report, stacks=STACKS, groups=[group(3)], config="run_dir: x\n")
    return report


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_post_mortem_is_read_back(where, bucket, tmp_path):
    folder = (
        path_of("gs://bucket/run" if where == "bucket" else tmp_path) / "post_mortem" / "step_000003_update_2"
    )
    report = written(folder)
    found = read_post_mortem(folder)
    assert found.report == {"schema_version": 1, **report}
    for stack, expected in zip(found.stacks, STACKS, strict=True):
        assert stack.keys() == expected.keys()
        for name, array in expected.items():
            assert stack[name].dtype == array.dtype
            np.testing.assert_array_equal(stack[name], array)
    assert [row["response"] for row in found.rollouts] == ["34", "35?"]
    assert (folder / "config.yaml").read_text() == "run_dir: x\n"


def test_an_incomplete_post_mortem_is_refused(tmp_path):
    """The report is written last."""
    written(tmp_path)
    (tmp_path / "report.json").unlink()
    with pytest.raises(ValueError, match=r"no report\.json"):
        read_post_mortem(tmp_path)
