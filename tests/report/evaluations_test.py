"""The layout of evaluations: problems over time and across runs, and errors of damaged files."""

import gzip
import json

import numpy as np
import pytest

from dapo_jax.config import ConfigError
from dapo_jax.report.chunks import key_of
from dapo_jax.report.evaluations import ABSENT, lay_out_evaluations
from dapo_jax.report.runs import read_runs
from tests.report.made import problem_line, write_evaluation, write_run


def opened(laid):
    """Returns each dataset's description and its numbers (correct, samples) as [2, evaluations, problems]."""
    numbers, found, start = np.frombuffer(gzip.decompress(laid.index), "<u2"), {}, 0
    for about in laid.about["datasets"]:
        shape = (2, len(about["evaluations"]), len(about["keys"]))
        size = int(np.prod(shape))
        found[about["name"]] = about, numbers[start : start + size].reshape(shape)
        start += size
    assert start == len(numbers)
    return found


def chunk(laid, number):
    return json.loads(gzip.decompress(laid.chunks[number]))


def test_a_problem_keeps_its_place_when_it_is_asked_again_and_new_ones_follow(tmp_path):
    lines = [problem_line(0, 3), problem_line(1, 0)]
    files = [
        write_evaluation(tmp_path, 0, lines),
        write_evaluation(tmp_path, 5, [problem_line(7, 8), problem_line(1, 2, 4)]),
    ]
    laid = lay_out_evaluations(files)
    about, numbers = opened(laid)["aime_2024"]
    assert about["heads"] == [f"problem {place}: 1+1?" for place in (0, 1, 7)]
    assert numbers[0].tolist() == [[3, 0, ABSENT], [ABSENT, 2, 8]]
    assert numbers[1].tolist() == [[8, 8, ABSENT], [ABSENT, 4, 8]]
    assert [step for step, _ in about["evaluations"]] == [0, 5]
    texts = [text for number, _ in about["texts"] for text in chunk(laid, number)]
    assert [count for _, count in about["texts"]] == [2, 1]
    assert texts[2] == ["problem 7: 1+1?", "2", "held_out.jsonl, line 8"]
    of_first = chunk(laid, about["evaluations"][0][1])
    assert of_first["0"]["extracted"] == [["2", 3, 3], [None, 5, 0]]
    assert of_first["0"]["responses"][0]["correct"] is True
    assert about["keys"][0] == key_of("problem 0: 1+1?", "2")
    assert key_of("\ud83d", "") != key_of("\ud83c", ""), "halves of surrogate pairs"


def test_the_same_prompt_twice_is_two_problems_and_datasets_are_separate(tmp_path):
    same = [problem_line(0, right, prompt="again") for right in (1, 2)]
    files = [write_evaluation(tmp_path, step, same, name=name) for name in ("a", "hf:b/c") for step in (0, 1)]
    files.append(write_evaluation(tmp_path, 0, [], name="none"))
    found = opened(lay_out_evaluations(files))
    assert list(found) == ["a", "hf:b/c"]
    assert found["a"][1][0].tolist() == [[1, 2], [1, 2]]


def test_some_of_many_evaluations_are_chosen_with_all_datasets(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    for step in range(9):
        for name in ("a", "b"):
            write_evaluation(run, step, [problem_line(0, step % 8)], name=name)
    [found] = read_runs([run])
    assert len(found.evaluations) == 18
    for about, _ in opened(lay_out_evaluations(found.evaluations, steps=3)).values():
        assert [step for step, _ in about["evaluations"]] == [0, 4, 8]
    assert lay_out_evaluations(found.evaluations, steps=0).about == {"datasets": [], "logged": 18}


def test_a_damaged_file_is_named(tmp_path):
    file = write_evaluation(tmp_path, 3, [problem_line(0, 1)])
    file.write_text(file.read_text()[:-20])
    with pytest.raises(ConfigError, match=r"aime_2024\.jsonl, line 1"):
        lay_out_evaluations([file])


def test_runs_judged_by_scores_have_mean_rewards_and_scores(tmp_path):
    """After the counts, four bytes each; unknown rewards are NaN."""
    lines = [problem_line(0, 0, reward=-1.5), problem_line(1, 0)]
    lines[0]["responses"][0]["score"] = -0.25
    files = [
        write_evaluation(tmp_path, 0, lines),
        write_evaluation(tmp_path, 5, [problem_line(2, 0, reward=0.5)]),
    ]
    laid = lay_out_evaluations(files, by_score=True)
    content = gzip.decompress(laid.index)
    assert len(content) == 2 * 2 * 3 * 2 + 2 * 3 * 4
    rewards = np.frombuffer(content[24:], "<f4").reshape(2, 3)
    np.testing.assert_array_equal(rewards, [[-1.5, np.nan, np.nan], [np.nan, np.nan, 0.5]])
    [about] = laid.about["datasets"]
    assert chunk(laid, about["evaluations"][0][1])["0"]["responses"][0]["score"] == -0.25
    plain = lay_out_evaluations(files)
    assert gzip.decompress(plain.index) == content[:24]
    assert "score" not in chunk(plain, about["evaluations"][0][1])["0"]["responses"][0]
