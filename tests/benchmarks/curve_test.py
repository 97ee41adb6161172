"""The comparison of curves with TRL: its reward, its prompts, and its page."""

import shutil
from pathlib import Path

import pytest

from benchmarks.curve import RESULTS, configuration, settings, show


@pytest.mark.slow  # prepares the data of a run in another process
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
