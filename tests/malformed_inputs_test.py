"""Mistakes in files, rows, templates and graders: one message that names the place, no traceback."""

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dapo_jax.cli import main
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.trackers.rollout_log import write_rollouts
from tests.text.folders import CHATML, files_of, write

GOOD = {"prompt": "1+1", "answer": "2"}
DAPO = {"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}}
USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}


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


def rows_file(name, *rows):
    """Writes JSON lines; bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    Path(name).write_bytes(b"\n".join(lines) + b"\n")


def cut_table():
    """Returns a parquet file without its last bytes."""
    written = io.BytesIO()
    parquet.write_table(pa.table({"prompt": ["1+1"], "answer": ["2"]}), written)
    return written.getvalue()[:-20]


FILES = {
    "no such file": ("data.jsonl", None, "no file or folder data.jsonl (looked from "),
    "an empty file": ("data.jsonl", b"", "data.jsonl: no rows"),
    "a text that is not JSON": ("data.jsonl", b"1+1,2", "data.jsonl, line 1: not JSON"),
    "a program's binary": ("data.jsonl", b"\x7fELF\x02\xff", "data.jsonl, line 1: byte 6 of the line is not UTF-8"),
    "a table": ("data.csv", b"prompt,answer\n1+1,2\n", "data.csv is of no known kind"),
    "a cut zip": (
        "data.jsonl.gz", gzip.compress(json.dumps(GOOD).encode() * 999)[:-9], "data.jsonl.gz cannot be read after line 0",
    ),
    "no zip": ("data.jsonl.gz", b'{"prompt": "1"}', "data.jsonl.gz cannot be read after line 0"),
    "no parquet": ("data.parquet", b'{"prompt": "1"}', "data.parquet cannot be read as parquet after row 0"),
    "a cut parquet": ("data.parquet", cut_table(), "data.parquet cannot be read as parquet after row 0"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "content", "message"), FILES.values(), ids=FILES)
def test_a_malformed_file_is_named(said, file, content, message):
    if content is not None:
        Path(file).write_bytes(content)
    assert message in said("data", "prepare", "jsonl", "--from", file, "--data-dir", "kept")


def test_a_folder_without_data_is_named(said):
    Path("data.jsonl").mkdir()
    message = said("data", "prepare", "jsonl", "--from", "data.jsonl", "--data-dir", "kept")
    assert "the folder data.jsonl has no file of the kinds" in message


ROWS = {
    "not JSON": ("jsonl", b"{'prompt': '1'}", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
    "not UTF-8": ("jsonl", b'{"prompt": "\xe9", "answer": "1"}', "byte 13 of the line is not UTF-8"),
    "a list": ("jsonl", [1, 2], "not a JSON object: a list"),
    "no prompt": ("jsonl", {"answer": "2"}, "no field 'prompt'"),
    "an empty prompt": ("jsonl", {"prompt": " ", "answer": "2"}, "'prompt' is empty"),
    "a number as prompt": ("jsonl", {"prompt": 11, "answer": "2"}, "'prompt' must be a string or a list of messages"),
    "a float as answer": ("jsonl", {"prompt": "1", "answer": 2.5}, "'answer' must be a string or an integer; got 2.5"),
    "a list as answer": ("jsonl", {"prompt": "1", "answer": ["2"]}, "'answer' must be a string or an integer; got ['2']"),
    "no messages": ("jsonl", {"prompt": [], "answer": "2"}, "'prompt' must be a string or a list of messages"),
    "a message of text": ("jsonl", {"prompt": ["1+1"], "answer": "2"}, "message 0 is '1+1'; it must be a mapping"),
    "a message without a role": ("jsonl", {"prompt": [{"content": "1"}], "answer": "2"}, "message 0: 'role' must be"),
    "nobody asks": ("jsonl", {"prompt": [ASSISTANT], "answer": "2"}, "no message is of role 'user'"),
    "answered already": ("jsonl", {"prompt": [USER, ASSISTANT], "answer": "2"}, "the last message is the assistant's"),
    "half a character": ("jsonl", {"prompt": "\udfff", "answer": "2"}, "half a surrogate pair"),
    "DAPO-Math without its answer": ("dapo_math_17k", {**DAPO, "reward_model": {}}, "no field 'reward_model.ground_truth'"),
    "DAPO-Math with a number": ("dapo_math_17k", {**DAPO, "reward_model": {"ground_truth": 2}}, "must be text; got 2 (int)"),
    "AIME without a problem": ("aime_2024", {**DAPO, "extra_info": {"raw_problem": ""}}, "'extra_info.raw_problem' is empty"),
    "GSM8K without its mark": ("gsm8k", {"question": "1+1?", "answer": "so 2"}, "nothing after '####'; it ends 'so 2'"),
    "MATH in GSM8K's form": ("math_500", {"question": "1+1?", "answer": "#### 2"}, "no field 'problem'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_malformed_row_is_named_with_file_and_line(said, name):
    source, row, message = ROWS[name]
    good = {
        "jsonl": GOOD,
        "gsm8k": {"question": "1?", "answer": "#### 1"},
        "math_500": {"problem": "1?", "answer": "1"},
    }
    rows_file("data.jsonl", good.get(source, DAPO), row)
    found = said("data", "prepare", source, "--from", "data.jsonl", "--data-dir", "kept")
    assert f"dataset '{source}': data.jsonl, line 2: " in found
    assert message in found


TEMPLATES = {
    "no place for the question": (["--prompt-template", "Solve this."], CHATML, "data.prompt_template: found 'Solve this.'"),
    "an unknown template": (["--prompt-template", "dappo"], CHATML, "or the name of a template: dapo"),
    "a chat without a template": (["--chat"], None, "data.jsonl, line 1: the prompt is a conversation, but the tokenizer has no"),
    "a template that is no Jinja": (["--chat"], "{% for", "chat_template.jinja"),
    "a template that raises": (["--chat"], "{{ raise_exception('no') }}", "data.jsonl, line 1: "),
    "a template that reaches out": (["--chat"], "{{ messages.__class__.__mro__ }}", "data.jsonl, line 1: "),
    "a system prompt without a chat": (["--system-prompt", "S"], CHATML, "data.jsonl, line 1: the prompt is plain text, but --system-prompt"),
    "an option that the library sets": (
        ["--chat", "--chat-template-kwargs", '{"messages": 1}'], CHATML, "data.chat_template_kwargs.messages: found 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_malformed_template_is_named(said, name):
    options, template, message = TEMPLATES[name]
    write(Path("model"), files_of(template=template))
    rows_file("data.jsonl", GOOD)
    told = ["--from", "data.jsonl", "--data-dir", "kept", "--model", "model"]
    assert message in said("data", "show", "jsonl", *told, *options)


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

def trl_none(prompts, completions, **columns):
    return [None for _ in completions]

def verl_without(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1}
"""

GRADERS = {
    "an unknown name": ("dappo", "no grader is named 'dappo'; did you mean 'dapo'?"),
    "an unknown module": ("no_such_module:f", "the module 'no_such_module' fails with ModuleNotFoundError"),
    "an unknown file": ("nowhere.py:f", "there is no file nowhere.py"),
    "an unknown function": ("mine.py:txt", "mine.py has no 'txt'; did you mean 'text'?"),
    "no function": ("mine.py:number", "'number' is of type int, which cannot be called"),
    "no name": ("mine.py:", "'mine.py:' names no function"),
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
    "TRL's None": ("trl:mine.py:trl_none", "returns one number for each"),
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
