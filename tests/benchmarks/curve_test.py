"""The comparison of curves with TRL: its reward, its prompts, and its page."""

import shutil
from pathlib import Path

import pytest

from benchmarks.curve import RESULTS, configuration, settings, show
from benchmarks.workload import exact_reward
from dapo_jax.dapo.overlong import overlong_penalty
from dapo_jax.rewards.graders import exact_grader


@pytest.mark.parametrize("text", ["=132", "7+5=12=132", "=131", "132", "", "=", "=132=", " 132\n"])
@pytest.mark.parametrize("tokens", [1, 32, 33, 40, 48])
@pytest.mark.parametrize("marker", ["=", ""])
def test_the_reward_equals_the_grader_and_the_penalty(text, tokens, marker):
    shaped = overlong_penalty(tokens, max_response_tokens=48, buffer_tokens=16)
    expected = (1.0 if exact_grader(marker)(text, "132").correct else -1.0) + shaped
    assert exact_reward(text, "132", tokens=tokens, limit=48, buffer=16, marker=marker) == expected


def test_the_prompts_of_trl_are_the_prompts_of_our_run():
    """A prompt such as 47+85 is five of the 15 characters, whose ids begin at 2."""
    given = settings(configuration("trl", Path("runs"), 3, ["steps=2"]))
    assert len(given["prompt_ids"]) == len(given["answers"]) == 2 * given["prompts_per_step"]
    alphabet = "0123456789+=:,?"
    for ids, answer in zip(given["prompt_ids"], given["answers"], strict=True):
        left, right = "".join(alphabet[token - 2] for token in ids).split("+")
        assert int(left) + int(right) == int(answer)


@pytest.mark.parametrize("name", [path.stem for path in sorted(RESULTS.glob("*.csv"))])
def test_the_page_has_the_tables_and_figures_of_its_curves(name, tmp_path):
    for file in ("README.md", f"{name}.csv"):
        shutil.copy(RESULTS / file, tmp_path)
    show(tmp_path, name)
    assert (tmp_path / "README.md").read_text() == (RESULTS / "README.md").read_text()
    assert (RESULTS / f"{name}.png").exists()
