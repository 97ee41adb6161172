"""Runs that read their data from files: a mixture to train on, datasets of their own to be judged by."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dapo_jax.config import DataConfig
from dapo_jax.run import train
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.rollout_log import read_problems


@pytest.fixture
def files(tmp_path):
    """Two files of short sums; the second has a prompt that is too long, and one twice."""
    first = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(4) for b in range(3)]
    second = [{"q": f"{a}+9", "a": a + 9} for a in (1, 2, 3, 3)] + [{"q": "11111+9", "a": 11120}]
    for name, rows in (("first", first), ("second", second)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.fixture
def config(micro, files):
    first = {"source": "jsonl", "path": str(files / "first.jsonl")}
    options = {"prompt": "q", "answer": "a"}
    second = {"source": "jsonl", "path": str(files / "second.jsonl"), "source_options": options}
    judges = [first | {"split": "train[:2]"}, second | {"split": "train[:3]", "name": "nines"}]

    def make(run_dir=None):
        plain = micro(run_dir or files / "run", checkpoint__every_steps=1)
        mixed = DataConfig(
            source="mixture",
            mixture=[first | {"weight": 2}, second],
            max_prompt_tokens=4,
        )
        return replace(plain, data=mixed, eval=replace(plain.eval, datasets=judges, prompts=0))

    return make


def shown():
    text = io.StringIO()
    return Progress(4, console=Console(file=text, width=200)), text


def test_a_mixture_is_trained_on_and_each_dataset_judged_apart(config, even_sum):
    progress, text = shown()
    result = train(config(), reward=even_sum, progress=progress)
    for line in (result.metrics[0], result.metrics[-1]):
        assert (line["eval/first/problems"], line["eval/nines/problems"]) == (2, 3)
        assert 0 <= line["eval/nines/avg@4"] <= 1
    for name, count in (("first", 2), ("nines", 3)):
        problems = read_problems(Path(result.run_dir) / "evaluations" / "step_000004" / f"{name}.jsonl")
        file = {"first": "first.jsonl", "nines": "second.jsonl"}[name]
        assert [problem["place"].partition(",")[0] for problem in problems] == [file] * count
    output = text.getvalue()
    assert "jsonl: 4 prompts from 5 rows (1 repeated)" in output
    assert "second: 1 of 4 prompts are longer than data.max_prompt_tokens=4 and are left out" in output
    assert "eval  first" in output
    assert "eval  nines" in output


@pytest.mark.slow
def test_an_interrupted_mixture_resumes_exactly(config, even_sum, same_run, files):
    whole = train(config(files / "whole"), reward=even_sum, progress=shown()[0])

    def interrupt(step, metrics):
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            train(config(), reward=even_sum, on_step=interrupt, resume=True, progress=shown()[0])
    same_run(train(config(), reward=even_sum, resume=True, progress=shown()[0]), whole)
