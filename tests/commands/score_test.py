"""Saved rollouts are graded again: the shares, and the disagreements of graders."""

import json
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.cli import main
from dapo_jax.commands.score import describe, score
from dapo_jax.config import ConfigError
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.trackers.rollout_log import write_problems, write_rollouts

OWN = Path(__file__).with_name("own_graders.py")
RESPONSES = ["Answer: 34", "Answer: 34.0", "**Answer: 34**", "Answer: 35"]


@pytest.fixture
def rollouts(tmp_path):
    """A folder with two steps of one group of four; recorded by the grader `dapo`: right, wrong, wrong, wrong."""
    prompt = Prompt(ordinal=7, tokens=np.array([1, 2], np.int32), text="17*2", answer="34", row={"level": 2})
    group = Group(
        prompt=prompt,
        rollouts=tuple(
            Rollout(
                response=Response(
                    record=Tokens(np.array([3, 4, 5], np.int32)),
                    finish_reason="stop",
                ),
                text=text,
                verdict=Verdict(correct=text == "Answer: 34", extracted="34", reason="as recorded"),
                reward=0.0,
            )
            for text in RESPONSES
        ),
    )
    for step in (1, 2):
        write_rollouts(tmp_path, step, [group])
    return tmp_path


def test_graders_are_compared_with_the_record_and_with_each_other(rollouts):
    scores = score(rollouts, ["dapo", "math"])
    assert [scores.accuracy(name) for name in ("recorded", "dapo", "math")] == [0.25, 0.25, 0.75]
    assert scores.agreement("recorded", "dapo") == 1.0
    assert scores.agreement("dapo", "math") == 0.5
    assert scores.disagreements("dapo", "math") == [1, 2, 5, 6]


def test_the_description_shows_the_first_disagreements_with_both_reasons(rollouts, capsys):
    assert main(["score", str(rollouts), "--grader", "dapo", "--grader", "math", "--show", "1"]) == 0
    text = capsys.readouterr().out
    # Of the eight, `dapo` takes 1 + 1 and `math` 3 + 3, all of dapo's among them.
    assert text.splitlines()[2:6] == [
        "          correct  recorded     dapo     math",
        "recorded    25.0%    100.0%   100.0%    50.0%",
        "dapo        25.0%    100.0%   100.0%    50.0%",
        "math        75.0%     50.0%    50.0%   100.0%",
    ]
    assert "dapo and math differ on 4 of 8; correct only for dapo: 0, correct only for math: 4" in text
    assert "  step 1, prompt 7, response 1, answer '34': ...Answer: 34.0" in text
    assert "    dapo: wrong; after the last 'Answer:': expected '34'" in text
    assert text.count("  step 1, ") == text.count("  step ") == 2  # recorded and math, dapo and math


def test_an_own_function_gets_the_row_and_the_tokens(rollouts):
    own = f"{OWN}:long_ones"
    assert score(rollouts, [own]).accuracy(own) == 0.5
    assert score(rollouts / "step_000001.jsonl", [own], workers=0).accuracy(own) == 0.5


def test_numbers_are_shown_as_scores(rollouts):
    """Lengths of -1 to -2: none of them is above 0."""
    own = f"{OWN}:brief"
    text = describe(score(rollouts, [own, "math"]))
    first, _, title, _, _, recorded, mine, *_ = text.splitlines()
    lengths = [-len(response) / 10 for response in RESPONSES]
    assert first == f"{own}  mean score {sum(lengths) / 4:.4g}, from {min(lengths):g} to {max(lengths):g}"
    assert title.startswith("8 responses; ")
    assert recorded.split()[:2] == ["recorded", "25.0%"]
    assert mine.split()[:2] == [own, "0.0%"]
    assert f"    {own}: score -1;" in text


def test_recorded_scores_are_shown_and_may_be_missing(rollouts):
    """Three of four responses have one."""
    file = rollouts / "step_000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, number in zip(rows, (-1, -2, -1.5, None), strict=True):
        row.update(score=number, correct=False, extracted=None)
    del rows[0]["index"]  # only shown
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = describe(score(file, ["dapo"]))
    assert text.startswith("recorded  mean score -1.5, from -2 to -1; 1 of 4 responses have none\n\n")
    assert "recorded     0.0%" in text
    assert "  step 1, prompt 7, response None, answer '34': ...Answer: 34" in text
    del rows[0]["answer"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"rollout without 'answer'"):
        score(file, ["dapo"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_whole_group_function_gets_the_responses_of_one_step_and_prompt(rollouts, workers):
    own = f"{OWN}:longest"
    verdicts = score(rollouts, [own], workers=workers).verdicts[own]
    assert [verdict.correct for verdict in verdicts] == [False, False, True, False] * 2


def test_groups_of_two_datasets_with_the_same_step_and_ordinal_stay_apart(rollouts):
    """As in two evaluations of one problem each."""
    own, second = f"{OWN}:longest", rollouts / "step_000002.jsonl"
    second.write_text(second.read_text().replace('"step": 2', '"step": 1').replace('"17*2"', '"34*1"'))
    verdicts = score(rollouts, [own], workers=0).verdicts[own]
    assert [verdict.correct for verdict in verdicts] == [False, False, True, False] * 2


def test_what_cannot_be_scored_is_named(rollouts, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"reward\.grader: .*'dappo'.*'dapo' or 'dapo_boxed'\?"):
        score(rollouts, ["dappo"])
    with pytest.raises(ConfigError, match=r"cannot read rollouts: .*No such file"):
        score(tmp_path / "none.jsonl", ["dapo"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="empty contains no rollouts"):
        score(empty, ["dapo"])
    (empty / "step_000001.jsonl").write_text("{}\n")
    assert main(["score", str(empty), "--grader", "dapo"]) == 2
    assert "step_000001.jsonl, line 1 is not a rollout" in capsys.readouterr().err


def test_the_problems_next_to_kept_rollouts_are_not_graded(rollouts):
    """`eval --keep` writes them to a subfolder."""
    problems = write_problems(rollouts / "problems", [{"samples": 4}], name="arithmetic", step=0)
    assert len(score(rollouts, ["dapo"]).rows) == 8
    with pytest.raises(ConfigError, match=r"arithmetic\.jsonl, line 1 is not a rollout"):
        score(problems, ["dapo"])
    with pytest.raises(ConfigError, match=r"problems contains no rollouts"):
        score(problems.parent, ["dapo"])
