"""Prompts: their order, random access, templates, limits, and checks of rows given from Python."""

import subprocess
import sys

import numpy as np
import pytest

from dapo_jax.config import DataConfig
from dapo_jax.data.prompts import PromptSource, held_out, row_order
from dapo_jax.data.rows import checked_rows
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer

ROWS = [{"prompt": f"{n}+{n}", "answer": str(2 * n), "topic": "sums"} for n in range(10, 40)]
TOKENIZER = ByteTokenizer()


def source(rows=ROWS, **options):
    return PromptSource(rows, TOKENIZER, **({"seed": 0, "max_prompt_tokens": 32} | options))


def test_prompt_carries_its_row_and_place():
    prompt = source(shuffle=False)[32]  # 32 = 30 + 2: the third row of the second epoch
    assert (prompt.ordinal, prompt.text, prompt.answer, prompt.row["topic"]) == (32, "12+12", "24", "sums")
    np.testing.assert_array_equal(prompt.tokens, TOKENIZER.encode("12+12"))


@pytest.mark.parametrize(
    ("chat", "question"), [(False, "1+1"), (True, "1+1"), (False, [{"role": "user", "content": "1+1"}])]
)
def test_a_prompt_is_plain_unless_the_chat_template_renders_it(chat_tokenizer, chat, question):
    rows = [{"prompt": question, "answer": "2"}]
    prompt_format = PromptFormat(DataConfig(chat=chat))
    [prompt] = held_out(rows, chat_tokenizer, prompt_format=prompt_format, max_prompt_tokens=99)
    assert prompt.is_plain == (prompt.text == "1+1")


def test_the_prompt_of_an_ordinal_does_not_depend_on_earlier_ones():
    asked_in_order = source()
    texts = [asked_in_order[ordinal].text for ordinal in range(70)]
    assert source()[64].text == texts[64]
    assert [source()[ordinal].text for ordinal in (69, 0, 31)] == [texts[69], texts[0], texts[31]]


def test_braces_in_questions_and_templates_survive():
    rows = [{"prompt": "the set {1, 2} and {prompt}", "answer": "2"}]
    braces = PromptFormat(DataConfig(prompt_template="{x} {prompt} {0}"))
    [prompt] = held_out(rows, TOKENIZER, prompt_format=braces, max_prompt_tokens=64)
    assert prompt.text == "{x} the set {1, 2} and {prompt} {0}"


def test_a_prompt_over_the_limit_is_refused():
    rows = [{"prompt": "1234", "answer": "1"}, {"prompt": "12345", "answer": "1"}]
    prompts = source(rows, max_prompt_tokens=4, shuffle=False)
    assert len(prompts[0].tokens) == 4
    with pytest.raises(ValueError, match=r"row 1: .* 5 tokens.*max_prompt_tokens=4"):
        prompts[1]


def test_character_that_cannot_be_tokenized_names_the_row():
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "1-1", "answer": "0"}]
    with pytest.raises(ValueError, match="row 1: character '-' at position 1"):
        held_out(rows, CharTokenizer("0123456789+"), max_prompt_tokens=8)


def test_held_out_prompts_are_the_first_rows_in_their_own_order():
    prompts = held_out(ROWS, TOKENIZER, max_prompt_tokens=32, limit=3)
    assert [(prompt.ordinal, prompt.text) for prompt in prompts] == [(0, "10+10"), (1, "11+11"), (2, "12+12")]


def test_integer_answers_become_text_and_other_fields_stay():
    rows = checked_rows([{"prompt": "1-2", "answer": -1, "level": 3}, {"prompt": "2", "answer": np.int64(7)}])
    assert rows == [{"prompt": "1-2", "answer": "-1", "level": 3}, {"prompt": "2", "answer": "7"}]


def test_the_chat_template_counts_towards_the_limit(chat_tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}]
    [prompt] = held_out(rows, chat_tokenizer, max_prompt_tokens=64)
    assert prompt.text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.row["prompt"] == rows[0]["prompt"]
    length = len(prompt.tokens)
    assert len(chat_tokenizer.encode("1+1")) < length == len(chat_tokenizer.encode(prompt.text))
    held_out(rows, chat_tokenizer, max_prompt_tokens=length)
    with pytest.raises(ValueError, match=f"row 0: the prompt has {length} tokens"):
        held_out(rows, chat_tokenizer, max_prompt_tokens=length - 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, r"row 1: no field 'prompt'; its fields are \['answer'\]"),
        ({"prompt": "1"}, "row 1: no field 'answer'"),
        ({"prompt": 1, "answer": "1"}, "row 1: 'prompt' .* got 1"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "row 1: message 0: 'content' .* got None"),
        ({"prompt": "1", "answer": 1.0}, "row 1: 'answer' .* got 1.0"),
        ({"prompt": "1", "answer": True}, "row 1: 'answer' .* got True"),
        (
            {"prompt": '[{"role": "user"}]', "answer": "1"},
            "row 1: 'prompt' is a text .* the list of messages",
        ),
        ({"prompt": "[ {'from': 'human'}]", "answer": "1"}, "row 1: 'prompt' is a text"),
        (
            {"prompt": [{"from": "human", "value": "1"}], "answer": "1"},
            "row 1: message 0: 'role' .* None: .*'from'",
        ),
        ({"prompt": " ", "answer": "1"}, "row 1: 'prompt' is empty"),
        ({"prompt": "1", "answer": ""}, "row 1: 'answer' is empty"),
    ],
)
def test_bad_row_is_named_with_its_field(row, message):
    with pytest.raises(ValueError, match=message):
        checked_rows([{"prompt": "1", "answer": "1"}, row])


def test_importing_the_data_package_loads_neither_grain_nor_tfds():
    code = "import sys, dapo_jax.data; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"grain", "tensorflow_datasets", "tensorflow"} & set(loaded.split())


COUNT = 40


def test_every_epoch_visits_every_row_once_in_a_new_order():
    row_at = row_order([range(COUNT)], seed=3, shuffle=True)
    epochs = [[row_at[epoch * COUNT + place] for place in range(COUNT)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert epochs[0] != list(range(COUNT))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_order_depends_on_the_seed_alone():
    first, same, other = (row_order([range(COUNT)], seed=seed, shuffle=True) for seed in (3, 3, 4))
    assert [first[place] for place in range(COUNT)] == [same[place] for place in range(COUNT)]
    assert [first[place] for place in range(COUNT)] != [other[place] for place in range(COUNT)]


def test_a_mixture_samples_by_weight_and_each_part_has_its_own_epochs():
    """Weights 3 and 1: of any 400 places 300 and 100, to within two; the parts' own orders are whole epochs."""
    order = row_order([range(10), range(10, 14)], weights=[3.0, 1.0], seed=2, shuffle=True)
    for start in (0, 1001):
        rows = [order[place] for place in range(start, start + 400)]
        assert abs(sum(row < 10 for row in rows) - 300) <= 2
    first = [row for row in (order[place] for place in range(80)) if row < 10]
    second = [row for row in (order[place] for place in range(80)) if row >= 10]
    assert sorted(first[:10]) == sorted(first[10:20]) == list(range(10))
    assert sorted(second[:4]) == sorted(second[4:8]) == [10, 11, 12, 13]
    assert first[:10] != first[10:20]


def test_an_order_needs_rows_in_each_part():
    with pytest.raises(ValueError, match="no rows"):
        row_order([range(3), []], seed=0, shuffle=True)
