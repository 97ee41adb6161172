"""Datasets of the user's files: questions and answers, repeated rows, bad rows and their places."""

import json
import os
import re

import pytest

from dapo_jax.config.data_schema import TEMPLATES
from dapo_jax.data.sources import load_rows

WRAPPED = TEMPLATES["dapo"].replace("{prompt}", "What is 1+1?")
DAPO_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 7},
}


def lines(path, *rows):
    """Writes rows as JSON lines; bytes are written as they are."""
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


@pytest.fixture
def load(tmp_path):
    """`load_rows` of the train split, or the only split, into the test's folder."""

    def of(source, path, split="train", **settings):
        settings |= {"data_dir": tmp_path / "prepared", "path": str(path), "or_only": split == "train"}
        return load_rows(source, split, **settings)

    return of


@pytest.mark.parametrize("asked", ["What is 1+1?", WRAPPED])
def test_dapo_math_questions_have_no_instructions(tmp_path, load, asked):
    row = {**DAPO_ROW, "prompt": [{"role": "user", "content": asked}]}
    [found] = load("dapo_math_17k", lines(tmp_path / "dapo.jsonl", row))
    assert (found["prompt"], found["answer"]) == ("What is 1+1?", "2")
    assert found["data_source"] == "math_dapo"
    assert found["extra_info"] == {"index": 7}
    assert (found["source_name"], found["source_row"]) == ("dapo_math_17k", "dapo.jsonl, line 1")


def test_aime_takes_the_raw_problem_and_each_problem_once(tmp_path, load):
    row = {**DAPO_ROW, "extra_info": {"raw_problem": "How many?"}}
    path = lines(tmp_path / "aime.jsonl", *[row] * 32, DAPO_ROW)
    found = load("aime_2024", path, "test")
    assert [row["prompt"] for row in found] == ["How many?", "What is 1+1?"]
    assert found.note == "aime_2024: 2 prompts from 33 rows (31 repeated)"


def test_gsm8k_answers_follow_the_mark_and_the_working_is_a_demonstration(tmp_path, load):
    worked = "1 + 1 = <<1+1=2>>2\n#### 1,200"
    lines(tmp_path / "train.jsonl", {"question": "How many?", "answer": worked})
    lines(tmp_path / "test.jsonl", {"question": "And now?", "answer": "#### 3"})
    [found] = load("gsm8k", tmp_path)
    assert (found["prompt"], found["answer"], found["response"]) == ("How many?", "1,200", worked)
    assert load("gsm8k", tmp_path, "test")[0]["answer"] == "3"


def test_math_500_is_problem_and_answer_and_keeps_the_rest(tmp_path, load):
    row = {"problem": "Solve.", "answer": r"\frac12", "solution": "so", "level": 3}
    [found] = load("math_500", lines(tmp_path / "m.jsonl", row), "test")
    assert (found["prompt"], found["answer"], found["level"]) == ("Solve.", r"\frac12", 3)


def test_options_name_the_fields_of_any_file(tmp_path, load):
    path = lines(tmp_path / "own.jsonl", {"q": "1+1", "deep": {"a": 2}})
    [found] = load("jsonl", path, options={"prompt": "q", "answer": "deep.a"})
    assert (found["prompt"], found["answer"], found["q"]) == ("1+1", "2", "1+1")


def test_the_files_name_is_the_split(tmp_path, load):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "dev", "trained"):
        lines(tmp_path / f"{name}.jsonl", {"prompt": name, "answer": "1"})
    train, validation = (
        [row["prompt"] for row in load("jsonl", tmp_path, split)] for split in ("train", "validation")
    )
    # `trained` does not name a split and is in the default one.
    assert train == ["train-00000-of-00002", "train-00001-of-00002", "trained"]
    assert validation == ["dev"]


def test_repeated_prompts_are_dropped_and_counted(tmp_path, load):
    rows = [{"prompt": "1+1", "answer": answer} for answer in ("2", "2", "3")]
    path = lines(tmp_path / "own.jsonl", *rows, {"prompt": "2+2", "answer": "4"})
    found = load("jsonl", path)
    assert [row["answer"] for row in found] == ["2", "4"]
    assert found.note == "jsonl: 2 prompts from 4 rows (2 repeated, 1 of them with a different answer)"
    assert len(load("jsonl", path, deduplicate=False)) == 4


def test_rows_may_be_compared_by_further_fields(tmp_path, load):
    """Three rows have demonstrations of one prompt, and two of the rows are equal."""
    rows = [{"prompt": "1+1", "answer": "2", "response": response} for response in ("2", "=2", "2")]
    path = lines(tmp_path / "own.jsonl", *rows)
    assert [row["response"] for row in load("jsonl", path)] == ["2"]
    found = load("jsonl", path, deduplicate=("prompt", "response", "responses"))
    assert [row["response"] for row in found] == ["2", "=2"]
    assert found.note == "jsonl: 2 prompts from 3 rows (1 repeated)"


def test_equal_messages_are_repeated_in_any_order_of_their_keys(tmp_path, load):
    rows = [
        {"prompt": [dict(message)], "answer": "2"}
        for message in ([("role", "user"), ("content", "1+1")], [("content", "1+1"), ("role", "user")])
    ]
    assert len(load("jsonl", lines(tmp_path / "own.jsonl", *rows))) == 1


BAD = [
    ({"answer": "1"}, "line 2: no field 'prompt'; the row's fields are ['answer']"),
    ({"prompt": [{"role": "user"}], "answer": "1"}, "line 2: message 0: 'content' must be a string"),
    ({"prompt": "\ud800", "answer": "1"}, "line 2: a text contains a lone surrogate"),
    (b'{"prompt": "\xff", "answer": "1"}', "line 2: not JSON: 'utf-8' codec can't decode byte 0xff"),
    (b'{"prompt": ', "line 2: not JSON"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_row_is_an_error_with_its_line_or_is_skipped_and_counted(tmp_path, load, bad, message):
    good, more = {"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}
    path = lines(tmp_path / "own.jsonl", good, bad, more)
    with pytest.raises(ValueError, match=rf"^own\.jsonl, {re.escape(message)}.*data\.on_bad_row=skip"):
        load("jsonl", path)
    found = load("jsonl", path, on_bad_row="skip")
    assert [row["answer"] for row in found] == ["2", "4"]
    assert found.note.startswith(f"jsonl: 2 prompts from 3 rows (1 bad: own.jsonl, {message}")


@pytest.mark.parametrize(
    ("source", "row", "message"),
    [
        ("dapo_math_17k", {"prompt": "x", "reward_model": {}}, "no field 'reward_model.ground_truth'"),
        ("aime_2024", {**DAPO_ROW, "extra_info": {"raw_problem": " "}}, "'prompt' is empty"),
        ("gsm8k", {"question": "How?", "answer": "it is 3"}, "'####'; it ends with 'it is 3'"),
        ("math_500", {"question": "How?", "answer": "3"}, "no field 'problem'"),
    ],
)
def test_each_dataset_names_missing_fields(tmp_path, load, source, row, message):
    with pytest.raises(ValueError, match=rf"^own\.jsonl, line 1: .*{re.escape(message)}"):
        load(source, lines(tmp_path / "own.jsonl", row))


def test_a_dataset_of_bad_rows_only_is_refused(tmp_path, load):
    path = lines(tmp_path / "own.jsonl", b"{", b"[")
    with pytest.raises(ValueError, match=r"own\.jsonl: all rows are bad.* own\.jsonl, line 1"):
        load("jsonl", path, on_bad_row="skip")


def test_a_dataset_is_found_by_content_not_by_folder(tmp_path, load):
    path = lines(tmp_path / "own.jsonl", {"prompt": "1", "answer": "1"})
    assert load("jsonl", path)[0]["answer"] == "1"
    lines(path, {"prompt": "1", "answer": "2"})
    assert load("jsonl", path)[0]["answer"] == "2"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path.rename(elsewhere / "own.jsonl")
    load("jsonl", elsewhere / "own.jsonl")
    assert len(list((tmp_path / "prepared" / "jsonl").iterdir())) == 2


def test_a_bad_file_leaves_nothing_prepared(tmp_path, load):
    with pytest.raises(ValueError, match="line 1"):
        load("jsonl", lines(tmp_path / "own.jsonl", b"{"))
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("gsm8k", {}, r"data\.path"),
        ("jsonl", {"path": "own.jsonl", "options": {"promt": "q"}}, "'promt'; there are prompt, answer"),
        ("arithmetic", {"path": "own.jsonl"}, "'arithmetic' does not read files"),
        ("arithmetic", {"options": {"min_words": 3}}, "has no options"),
        ("reasoning_gym:gcd", {"path": "own.jsonl"}, r"data\.path"),
    ],
)
def test_settings_of_sources_are_checked(tmp_path, monkeypatch, source, settings, message):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "own.jsonl", {"prompt": "1", "answer": "1"})
    with pytest.raises(ValueError, match=message):
        load_rows(source, "train", tmp_path / "prepared", **settings)


REAL = os.environ.get("DAPO_JAX_DATA")


@pytest.mark.skipif(not REAL, reason="DAPO_JAX_DATA does not name a folder with the four published datasets")
@pytest.mark.parametrize(
    ("source", "split", "note"),
    [
        ("dapo_math_17k", "train", "17,290 prompts from 17,917 rows (627 repeated, 11 of them with a different answer)"),
        ("aime_2024", "test", "30 prompts from 960 rows (930 repeated)"),
        ("gsm8k", "train", "7,473 prompts from 7,473 rows"),
        ("gsm8k", "test", "1,319 prompts from 1,319 rows"),
        ("math_500", "test", "500 prompts from 500 rows"),
    ],
)  # fmt: skip
def test_the_published_files_have_their_known_counts(load, source, split, note):
    found = load(source, f"{REAL}/{source}", split)
    assert found.note == f"{source}: {note}"
    assert note.startswith(f"{len(found):,} prompts")
