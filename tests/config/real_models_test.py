"""The configurations for a real model: data, lengths and batches fit together, without the model at hand."""

from pathlib import Path

import pytest

from dapo_jax.config import load_config
from dapo_jax.data import load_rows
from dapo_jax.data.builders.one_digit_arithmetic import split_questions

CONFIGS = Path(__file__).parents[2] / "configs"
ARITHMETIC = CONFIGS / "smollm2_135m_arithmetic.yaml"
LETTERS = CONFIGS / "smollm2_135m_letter_counting.yaml"


def examples_of(template):
    """Returns the solved questions before the asked question, one per line."""
    *examples, asked = template.split("\n")
    assert "{prompt}" in asked
    return examples


def test_every_arithmetic_prompt_and_answer_fits_its_limit():
    """A byte-level tokenizer needs at most one token a character."""
    config = load_config(ARITHMETIC)
    for questions in split_questions().values():
        for question in questions:
            asked = config.data.prompt_template.replace("{prompt}", question["prompt"])
            assert len(asked) <= config.data.max_prompt_tokens
            answer_tokens = len(f" {question['answer']}\n")
            assert answer_tokens <= config.sampling.max_response_tokens - config.reward.overlong.buffer_tokens


def test_arithmetic_examples_are_right_and_of_the_training_split():
    """An example that is held out would show its answer in every prompt."""
    examples = examples_of(load_config(ARITHMETIC).data.prompt_template)
    train = {question["prompt"]: question["answer"] for question in split_questions()["train"]}
    assert len(examples) == 2
    for example in examples:
        text, answer = example.split(" = ")
        assert train[text] == answer


@pytest.mark.parametrize("path", [ARITHMETIC, LETTERS], ids=lambda path: path.stem)
def test_rows_hold_several_rollouts_and_an_update_several_rows(path):
    config = load_config(path)
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    assert config.row_tokens >= 4 * longest
    rollouts = config.batch.groups_per_update * config.batch.group_size
    assert rollouts * longest >= config.row_tokens * config.batch.rows_per_microbatch
    assert config.sampling.slots % config.batch.group_size == 0


def test_letter_counting_examples_are_right():
    for example in examples_of(load_config(LETTERS).data.prompt_template):
        _, letter, _, text, answer = example.split('"')
        assert text.count(letter) == int(answer.removeprefix("? "))


def test_letter_counting_questions_look_like_the_examples_and_none_is_an_example():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym")
    data = load_config(LETTERS).data
    examples = examples_of(data.prompt_template)
    test, train = (
        load_rows(data.source, f"{split}[:100]", options=data.source_options)
        for split in (data.eval_split, data.train_split)
    )
    for row in (*test, *train):
        before, letter, middle, text, after = row["prompt"].split('"')
        assert text.lower().count(letter) == int(row["answer"])
        assert not any(text in example for example in examples)
        for example in examples:
            parts = example.split('"')
            assert (parts[0], parts[2], parts[4][0]) == (before, middle, after)
