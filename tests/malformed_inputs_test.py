"""Mistakes in files, rows, templates and graders: one message that names the place, no traceback."""

from pathlib import Path

import numpy as np
import pytest

from dapo_jax.cli import main
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.trackers.rollout_log import write_rollouts
from tests.text.folders import files_of, write

GOOD = b'{"prompt": "1+1", "answer": "2"}'


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder of its own that must fail: its one message."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, status=2):
        assert main(list(arguments)) == status
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    return run


MESSAGES = {
    "no such file": (None, [], "no file or folder data.jsonl (current folder: "),
    "an empty file": (b"", [], "data.jsonl: no rows"),
    "a program's binary": (b"\x7fELF\x02\xff", [], "data.jsonl, line 1: not JSON: 'utf-8' codec can't decode"),
    "no question": (b'{"prompt": [{"role": "system", "content": "2"}], "answer": "2"}', [], "no message has the role 'user'"),
    "an unknown template": (GOOD, ["--prompt-template", "dappo"], "or the name of a template: dapo"),
    "a template that reaches out": (GOOD, ["--chat"], "data.jsonl, line 1: chat template"),
    "a system prompt without a chat": (GOOD, ["--system-prompt", "S"], "the prompt is plain text, but --system-prompt"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "options", "message"), MESSAGES.values(), ids=MESSAGES)
def test_a_malformed_file_row_or_template_is_named(said, content, options, message):
    """The rooms' own tests have more of them; here each is one message of the command."""
    write(Path("model"), files_of(template="{{ messages.__class__.__mro__ }}"))
    if content is not None:
        Path("data.jsonl").write_bytes(content)
    read = ["--from", "data.jsonl", "--data-dir", "kept", "--model", "model"]
    assert message in said("data", "show", "jsonl", *read, *options)


GRADER_FILE = """
from dapo_jax.rewards import whole_group

number = 3

def text(sample):
    return "yes"

def not_a_number(sample):
    return float("nan")

def nothing(sample):
    pass

def raises(sample):
    return sample.answr

@whole_group
def too_few(samples):
    return [True]

async def slow_text(sample):
    return "yes"

def trl_text(prompts, completions, **columns):
    return ["good" for _ in completions]

def verl_without(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1}
"""

GRADERS = {
    "an unknown module": ("no_such_module:f", "the module 'no_such_module' fails with ModuleNotFoundError"),
    "no function": ("mine.py:number", "'number' is of type int, which cannot be called"),
    "no name": ("mine.py:", "'mine.py:' must have the form module:function"),
    "a file that fails": ("broken.py:f", "broken.py fails with ZeroDivisionError"),
    "a file that is no Python": ("syntax.py:f", "syntax.py fails with SyntaxError"),
}

LATE = {
    "a text returned": ("mine.py:text", "reward function mine.py:text returned 'yes' (str)"),
    "NaN returned": ("mine.py:not_a_number", "reward function mine.py:not_a_number returned nan"),
    "nothing returned": ("mine.py:nothing", "reward function mine.py:nothing returned None"),
    "an exception": ("mine.py:raises", "mine.py:raises raised AttributeError: 'Sample' object has no attribute 'answr' (mine.py, line 16)"),
    "too few verdicts": ("mine.py:too_few", "returned 1 verdicts for 2 responses"),
    "an async text": ("mine.py:slow_text", "reward function mine.py:slow_text returned 'yes' (str)"),
    "TRL's text": ("trl:mine.py:trl_text", "trl:mine.py:trl_text returned"),
    "verl without a score": ("verl:mine.py:verl_without", "a mapping with 'score'"),
}  # fmt: skip


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("name", [*GRADERS, *LATE])
def test_a_malformed_grader_is_named_in_this_process_and_in_a_worker(said, name, workers):
    """A grader that cannot be loaded is an error of the configuration; if it fails when it grades, the status is 1."""
    grader, message = (GRADERS | LATE)[name]
    Path("mine.py").write_text(GRADER_FILE)
    Path("broken.py").write_text("1 / 0")
    Path("syntax.py").write_text("def f(:")
    response = Response(
        tokens=np.array([1], np.int32), logprobs=np.zeros(1, np.float32), finish_reason="stop"
    )
    rollout = Rollout(response=response, text="2", verdict=Verdict(correct=True), reward=1.0)
    prompt = Prompt(ordinal=0, tokens=np.array([1], np.int32), text="1+1", answer="2")
    write_rollouts("rollouts", 0, [Group(prompt=prompt, rollouts=(rollout, rollout))])
    told = ["--grader", grader, "--workers", workers]
    assert message in said("score", "rollouts", *told, status=1 if name in LATE else 2)
