"""Datasets of the user's files: what is a question and an answer, what is repeated, what is bad, and where it stands."""

import json
import os
from pathlib import Path

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
    """`load_rows` of the train split, or the only one, into a folder of the test's own."""

    def of(source, path, split="train", **told):
        options = told.pop("options", {})
        data_dir = tmp_path / "prepared"
        return load_rows(source, split, data_dir, options, path=str(path), or_only=split == "train", **told)

    return of


@pytest.mark.parametrize("asked", ["What is 1+1?", WRAPPED])
def test_dapo_math_is_asked_bare_whether_the_file_has_the_instructions_or_not(tmp_path, load, asked):
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
    assert found.note == "aime_2024: 2 prompts of 33 rows (31 repeated)"


def test_gsm8k_answers_stand_behind_the_mark_and_the_working_is_a_demonstration(tmp_path, load):
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


def test_any_file_says_which_fields_are_question_and_answer(tmp_path, load):
    path = lines(tmp_path / "own.jsonl", {"q": "1+1", "deep": {"a": 2}})
    [found] = load("jsonl", path, options={"prompt": "q", "answer": "deep.a"})
    assert (found["prompt"], found["answer"], found["q"]) == ("1+1", "2", "1+1")


def test_a_prompt_may_be_a_conversation(tmp_path, load):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    [found] = load("jsonl", lines(tmp_path / "own.jsonl", {"prompt": messages, "answer": "2"}))
    assert found["prompt"] == messages


def test_the_files_name_is_the_split(tmp_path, load):
    for name, text in [
        ("train-00000-of-00002", "a"),
        ("train-00001-of-00002", "b"),
        ("dev", "c"),
        ("trained", "d"),
    ]:
        lines(tmp_path / f"{name}.jsonl", {"prompt": text, "answer": "1"})
    found = {
        split: [row["prompt"] for row in load("jsonl", tmp_path, split)] for split in ("train", "validation")
    }
    # `trained` names no split: it is of the default one.
    assert found == {"train": ["a", "b", "d"], "validation": ["c"]}


def test_rows_keep_the_files_order(tmp_path, load):
    rows = [{"prompt": str(number), "answer": "1"} for number in range(300)]
    found = load("jsonl", lines(tmp_path / "own.jsonl", *rows))
    assert [row["prompt"] for row in found] == [row["prompt"] for row in rows]


def test_repeated_prompts_are_dropped_with_the_count_said_and_conflicts_counted(tmp_path, load):
    rows = [{"prompt": "1+1", "answer": answer} for answer in ("2", "2", "3")]
    path = lines(tmp_path / "own.jsonl", *rows, {"prompt": "2+2", "answer": "4"})
    found = load("jsonl", path)
    assert [row["answer"] for row in found] == ["2", "4"]
    assert found.note == "jsonl: 2 prompts of 4 rows (2 repeated, 1 of them with another answer)"
    assert len(load("jsonl", path, deduplicate=False)) == 4


def test_the_counts_are_said_again_when_the_dataset_is_found_prepared(tmp_path, load):
    path = lines(tmp_path / "own.jsonl", *[{"prompt": "1+1", "answer": "2"}] * 3)
    assert load("jsonl", path).note == load("jsonl", path).note == "jsonl: 1 prompts of 3 rows (2 repeated)"


BAD = [
    ({"answer": "1"}, "line 2: no field 'prompt'; the row's fields are ['answer']"),
    ({"prompt": "1"}, "line 2: no field 'answer'"),
    ({"prompt": "", "answer": "1"}, "line 2: 'prompt' is empty"),
    ({"prompt": "1", "answer": "  "}, "line 2: 'answer' is empty"),
    ({"prompt": 3, "answer": "1"}, "line 2: 'prompt' must be a string or a list of messages"),
    ({"prompt": "1", "answer": 1.5}, "line 2: 'answer' must be a string or an integer; got 1.5"),
    ({"prompt": "1", "answer": None}, "line 2: 'answer' must be a string or an integer; got None"),
    ({"prompt": [], "answer": "1"}, "line 2: 'prompt' must be a string or a list of messages"),
    ({"prompt": [{"role": "user"}], "answer": "1"}, "line 2: message 0: 'content' must be a string"),
    ({"prompt": "\ud800", "answer": "1"}, "line 2: a text holds half a surrogate pair"),
    (b'{"prompt": "\xff", "answer": "1"}', "line 2: byte 13 of the line is not UTF-8"),
    (b'{"prompt": ', "line 2: not JSON"),
    (b"null", "line 2: needs a JSON object; this is a NoneType"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_row_ends_it_with_file_and_line_or_is_skipped_and_counted(tmp_path, load, bad, message):
    path = lines(
        tmp_path / "own.jsonl", {"prompt": "1+1", "answer": "2"}, bad, {"prompt": "2+2", "answer": "4"}
    )
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - compared below, as plain text
        load("jsonl", path)
    assert str(refused.value).startswith(f"own.jsonl, {message}")
    assert str(refused.value).endswith("(data.on_bad_row=skip leaves such rows out and counts them)")
    found = load("jsonl", path, on_bad_row="skip")
    assert [row["answer"] for row in found] == ["2", "4"]
    assert found.note.startswith(f"jsonl: 2 prompts of 3 rows (1 bad: own.jsonl, {message}")


@pytest.mark.parametrize(
    ("source", "row", "message"),
    [
        ("dapo_math_17k", {"prompt": "x", "reward_model": {}}, "no field 'reward_model.ground_truth'"),
        ("dapo_math_17k", {"prompt": "x", "reward_model": {"ground_truth": 3}}, "must be text; got 3"),
        ("dapo_math_17k", {"reward_model": {"ground_truth": "3"}}, "no field 'prompt'"),
        ("aime_2024", {**DAPO_ROW, "extra_info": {"raw_problem": " "}}, "'extra_info.raw_problem' is empty"),
        (
            "gsm8k",
            {"question": "How?", "answer": "it is 3"},
            "'answer' has nothing behind '####'; it ends 'it is 3'",
        ),
        ("gsm8k", {"question": "How?", "answer": "so\n#### "}, "'answer' has nothing behind '####'"),
        ("math_500", {"question": "How?", "answer": "3"}, "no field 'problem'"),
    ],
)
def test_each_dataset_says_what_its_rows_lack(tmp_path, load, source, row, message):
    with pytest.raises(ValueError, match=r"^own\.jsonl, line 1: ") as refused:
        load(source, lines(tmp_path / "own.jsonl", row))
    assert message in str(refused.value)


def test_nothing_but_bad_rows_is_no_dataset(tmp_path, load):
    path = lines(tmp_path / "own.jsonl", b"{", b"[")
    with pytest.raises(
        ValueError, match=r"own\.jsonl: no rows; all of its rows are bad, the first: own\.jsonl, line 1"
    ):
        load("jsonl", path, on_bad_row="skip")


def test_an_empty_file_has_no_rows(tmp_path, load):
    with pytest.raises(ValueError, match=r"^own\.jsonl: no rows$"):
        load("jsonl", lines(tmp_path / "own.jsonl"))


def test_another_content_is_another_dataset_and_the_same_is_found_wherever_it_lies(tmp_path, load):
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
    ("source", "told", "message"),
    [
        ("gsm8k", {}, "dataset 'gsm8k' is read from a file or folder of yours: name it in data.path"),
        (
            "jsonl",
            {"path": "own.jsonl", "options": {"promt": "q"}},
            "no option 'promt'; there are prompt, answer",
        ),
        ("gsm8k", {"path": "own.jsonl", "options": {"prompt": "q"}}, "no option 'prompt'; it has none"),
        ("arithmetic", {"path": "own.jsonl"}, "'arithmetic' reads no files"),
        ("reasoning_gym:gcd", {"path": "own.jsonl"}, "'reasoning_gym:gcd' reads no file; leave data.path"),
    ],
)
def test_what_a_source_takes_is_checked(tmp_path, monkeypatch, source, told, message):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "own.jsonl", {"prompt": "1", "answer": "1"})
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - compared below, as plain text
        load_rows(source, "train", tmp_path / "prepared", told.pop("options", {}), **told)
    assert message in str(refused.value)


REAL = os.environ.get("DAPO_JAX_DATA")


@pytest.mark.skipif(not REAL, reason="DAPO_JAX_DATA names no folder with the four published datasets")
@pytest.mark.parametrize(
    ("source", "folder", "split", "count", "said"),
    [
        ("dapo_math_17k", "dapo_math_17k", "train", 17_290, "17,290 prompts of 17,917 rows (627 repeated, 11 of them with another answer)"),
        ("aime_2024", "aime_2024", "test", 30, "30 prompts of 960 rows (930 repeated)"),
        ("gsm8k", "gsm8k", "train", 7_473, "7,473 prompts of 7,473 rows"),
        ("gsm8k", "gsm8k", "test", 1_319, "1,319 prompts of 1,319 rows"),
        ("math_500", "math_500", "test", 500, "500 prompts of 500 rows"),
    ],
)  # fmt: skip
def test_the_published_files_have_their_known_counts(load, source, folder, split, count, said):
    found = load(source, Path(str(REAL)) / folder, split)
    assert len(found) == count
    assert found.note == f"{source}: {said}"
