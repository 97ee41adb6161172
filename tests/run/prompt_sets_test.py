"""Prompts of the data section of a configuration: mixtures, over-long prompts, datasets for evaluation."""

import json
from collections import Counter
from datetime import date

import pytest

from dapo_jax.config import ConfigError, DataConfig, EvalConfig, SftConfig, TrainConfig
from dapo_jax.run.prompt_sets import (
    concatenated,
    held_out_prompts,
    prompt_sets,
    training_prompts,
    with_template_date,
)
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.fixture
def sums(tmp_path):
    """Two files: one with 20 sums, and one with 10 sums, the last of them long."""
    files = {"sums": [f"{a}+1" for a in range(20)], "more": [f"{a}+2" for a in range(9)] + ["9" * 50]}
    for name, texts in files.items():
        rows = [json.dumps({"prompt": text, "answer": "1"}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


def data(folder, **options):
    return DataConfig(max_prompt_tokens=16, **options)


def one(folder, name, **options):
    return data(folder, source="jsonl", path=str(folder / f"{name}.jsonl"), **options)


def test_an_epoch_has_the_whole_dataset(sums):
    found = training_prompts(one(sums, "sums"), TOKENIZER, seed=0)
    source = found.training
    asked = [source[ordinal].text for ordinal in range(20)]
    assert sorted(asked) == sorted(f"{a}+1" for a in range(20))
    assert list(found.notes) == ["jsonl: 20 prompts from 20 rows"]


def test_over_long_prompts_are_left_out_and_counted(sums):
    found = training_prompts(one(sums, "more"), TOKENIZER, seed=0)
    source = found.training
    assert source.rows_per_epoch == 9
    assert sorted(source[ordinal].text for ordinal in range(9)) == [f"{a}+2" for a in range(9)]
    assert found.notes[1].startswith("more: 1 of 10 prompts are longer than data.max_prompt_tokens=16")


def test_the_template_counts_towards_the_length(sums):
    with pytest.raises(ConfigError, match=r"all 20 prompts are longer .*=16; .* 23 tokens"):
        training_prompts(one(sums, "sums", prompt_template="x" * 20 + "{prompt}"), TOKENIZER, seed=0)


def test_rows_from_python_are_measured_too():
    rows = [{"prompt": "1", "answer": 1}, {"prompt": "1" * 99, "answer": 1}]
    found = training_prompts(DataConfig(max_prompt_tokens=16), TOKENIZER, seed=0, rows=rows)
    source = found.training
    assert [source[ordinal].text for ordinal in range(3)] == ["1"] * 3
    assert len(found.notes) == 1


def test_a_mixture_samples_by_weight(sums):
    """Weights 1 and 3: of 400 prompts 100 and 300, to within two. The long prompt of the second file is left out."""
    parts = [
        {"source": "jsonl", "path": str(sums / "sums.jsonl")},
        {"source": "jsonl", "path": str(sums / "more.jsonl"), "weight": 3.0},
    ]
    found = training_prompts(data(sums, source="mixture", mixture=parts), TOKENIZER, seed=1)
    source = found.training
    asked = [source[ordinal] for ordinal in range(400)]
    count = Counter(prompt.row["source_row"].partition(",")[0] for prompt in asked)
    assert abs(count["sums.jsonl"] - 100) <= 2
    assert abs(count["more.jsonl"] - 300) <= 2
    assert max(len(prompt.tokens) for prompt in asked) <= 16
    assert len(found.notes) == 3


def test_an_over_long_prompt_is_an_error_in_evaluation(sums):
    datasets = [{"source": "jsonl", "path": str(sums / "more.jsonl")}]
    with pytest.raises(ConfigError, match=r"'jsonl': more\.jsonl, line 10: the prompt has 50 tokens"):
        held_out_prompts(one(sums, "sums"), EvalConfig(datasets=datasets), TOKENIZER)


def test_rows_that_an_evaluation_leaves_out_are_counted(sums):
    (sums / "eval.jsonl").write_text(
        '{"prompt": "1", "answer": "1"}\n{"prompt": "1", "answer": "2"}\n{"prompt": "2"}\n'
    )
    datasets = [{"source": str(sums / "eval.jsonl")}]
    config = one(sums, "sums", on_bad_row="skip")
    prompts, notes = held_out_prompts(config, EvalConfig(datasets=datasets), TOKENIZER)
    assert [prompt.text for prompt in prompts["eval"]] == ["1"]
    [note] = notes
    assert note.startswith("eval eval: ")
    assert (
        "1 prompts from 3 rows (1 repeated, 1 of them with a different answer; 1 bad: eval.jsonl, line 3"
        in note
    )


@pytest.mark.parametrize(
    ("rows", "held_out", "shared"),
    [
        (["1+1", "2+2"], ["2+2", "3+3"], 1),
        (["1+1", "2+2"], ["3+3"], 0),
        (["play", "play"], ["play"], 0),  # other fields distinguish the rows
    ],
)
def test_questions_in_training_and_evaluation_are_counted(rows, held_out, shared):
    rows, held_out = ([{"prompt": text, "answer": "1"} for text in texts] for texts in (rows, held_out))
    config = TrainConfig(run_dir=".", data=DataConfig(source="rows"))
    found = prompt_sets(config, TOKENIZER, rows=rows, eval_rows=held_out)
    assert len(found.notes) == (shared > 0)
    assert all(f"{shared} of {len(held_out)} prompts are also trained on" in note for note in found.notes)


def test_a_mixture_needs_datasets_to_evaluate_on(sums):
    mixed = data(sums, source="mixture", mixture=[{"source": "jsonl", "path": str(sums / "sums.jsonl")}])
    with pytest.raises(ConfigError, match=r"eval\.datasets: found \[\]"):
        held_out_prompts(mixed, EvalConfig(), TOKENIZER)


def test_a_missing_split_is_reported_with_the_existing_ones(sums):
    with pytest.raises(ConfigError, match=r"data\.source='jsonl', split 'test': .* \['train'\]"):
        held_out_prompts(one(sums, "sums"), EvalConfig(), TOKENIZER)


def test_joined_lists_are_one_list():
    rows = concatenated([[{"n": 0}, {"n": 1}], [{"n": 2}], [{"n": 3}, {"n": 4}]])
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4]
    assert (rows[-1]["n"], rows[-5]["n"]) == (4, 0)


def test_a_conversation_without_a_chat_template_is_a_configuration_error():
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": [{"role": "user", "content": "1"}], "answer": "1"}]
    with pytest.raises(ConfigError, match=r"the rows given from Python: row 1: .* no chat template"):
        held_out_prompts(DataConfig(source="rows"), EvalConfig(), TOKENIZER, rows=rows)


def test_the_day_is_the_configured_one_or_the_run_s_or_today():
    run, own = DataConfig(template_date="2024-07-26"), DataConfig(template_date="2023-01-02")
    assert with_template_date(own, like=run) == own
    assert with_template_date(DataConfig(), like=run) == run
    assert (
        with_template_date(DataConfig(), like=DataConfig()).template_date
        == with_template_date(DataConfig()).template_date
        != ""
    )
    assert PromptFormat(run).today == date(2024, 7, 26)
    assert PromptFormat().today is None


@pytest.mark.parametrize(
    "asked",
    [
        lambda data, rows: training_prompts(data, TOKENIZER, seed=0, rows=rows),
        lambda data, rows: held_out_prompts(data, EvalConfig(), TOKENIZER, rows=rows),
    ],
    ids=["training", "evaluation"],
)
def test_errors_in_rows_from_python_do_not_name_a_dataset(asked):
    with pytest.raises(ConfigError, match=r"rows given from Python: row 1: 'answer' is empty") as refused:
        asked(DataConfig(), [{"prompt": "1", "answer": "1"}, {"prompt": "1", "answer": ""}])
    assert "data.source" not in str(refused.value)


@pytest.mark.parametrize(("schema", "count"), [(SftConfig, 3), (TrainConfig, 1)])
def test_a_warm_start_trains_on_every_demonstration_of_a_prompt(schema, count, tmp_path):
    """Three rows have the same prompt and different responses. A training run samples the responses, so it needs the prompt once."""
    rows = [json.dumps({"prompt": "1+1", "answer": "2", "response": "=" * n + "2"}) for n in range(3)]
    (tmp_path / "own.jsonl").write_text("\n".join(rows))
    config = schema(data=one(tmp_path, "own", eval_split="train"), run_dir=".")
    found = prompt_sets(config, TOKENIZER)
    assert found.training.rows_per_epoch == count
    assert [len(prompts) for prompts in found.held_out.values()] == [1]
    assert found.notes[-1].startswith("eval own: 1 of 1 prompts are also trained on")
