"""Prompts: random access, templates, limits, and the checks on rows given from Python."""

import subprocess
import sys

import numpy as np
import pytest

from dapo_jax.data.prompts import PromptSource, held_out
from dapo_jax.data.rows import checked_rows
from dapo_jax.data.sources import load_rows
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer

ROWS = [{"prompt": f"{n}+{n}", "answer": str(2 * n), "topic": "sums"} for n in range(10, 40)]
TOKENIZER = ByteTokenizer()


def source(rows=ROWS, **options):
    return PromptSource(rows, TOKENIZER, **({"seed": 0, "max_prompt_tokens": 32} | options))


def test_prompt_carries_its_row_and_place():
    prompt = source(shuffle=False)[32]
    assert prompt.ordinal == 32
    assert prompt.text == "12+12"  # 32 = 30 + 2: the third row of the second epoch
    assert prompt.answer == "24"
    assert prompt.row["topic"] == "sums"
    np.testing.assert_array_equal(prompt.tokens, TOKENIZER.encode("12+12"))


def test_any_ordinal_gives_the_same_prompt_whatever_was_asked_before():
    asked_in_order = source()
    texts = [asked_in_order[ordinal].text for ordinal in range(70)]
    assert source()[64].text == texts[64]
    assert [source()[ordinal].text for ordinal in (69, 0, 31)] == [texts[69], texts[0], texts[31]]


def test_second_epoch_asks_every_question_again_in_a_new_order():
    prompts = source()
    epochs = [[prompts[epoch * 30 + place].text for place in range(30)] for epoch in range(2)]
    assert prompts.rows_per_epoch == 30
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(row["prompt"] for row in ROWS)
    assert epochs[0] != epochs[1]


def test_hosts_that_stride_over_ordinals_cover_what_one_host_asks():
    prompts = source()
    strided = {ordinal: prompts[ordinal].text for host in range(4) for ordinal in range(host, 40, 4)}
    assert strided == {ordinal: prompts[ordinal].text for ordinal in range(40)}


def test_shuffle_off_keeps_the_rows_order():
    prompts = source(shuffle=False)
    assert [prompts[ordinal].text for ordinal in range(30)] == [row["prompt"] for row in ROWS]


def test_braces_in_questions_and_templates_survive():
    rows = [{"prompt": "the set {1, 2} and {prompt}", "answer": "2"}]
    [prompt] = held_out(
        rows, TOKENIZER, prompt_format=PromptFormat(template="{x} {prompt} {0}"), max_prompt_tokens=64
    )
    assert prompt.text == "{x} the set {1, 2} and {prompt} {0}"


def test_prompt_at_the_limit_passes_and_one_over_it_names_row_length_and_remedy():
    rows = [{"prompt": "1234", "answer": "1"}, {"prompt": "12345", "answer": "1"}]
    prompts = source(rows, max_prompt_tokens=4, shuffle=False)
    assert len(prompts[0].tokens) == 4
    with pytest.raises(ValueError, match=r"row 1: .* has 5 tokens, .*max_prompt_tokens=4; raise"):
        prompts[1]


def test_the_template_counts_towards_the_limit():
    with pytest.raises(ValueError, match="has 8 tokens"):
        source(prompt_format=PromptFormat(template="Q: {prompt}"), max_prompt_tokens=7)[0]


def test_character_that_cannot_be_tokenized_names_the_row():
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "1-1", "answer": "0"}]
    with pytest.raises(ValueError, match="row 1: character '-' at position 1"):
        held_out(rows, CharTokenizer("0123456789+"), max_prompt_tokens=8)


def test_negative_ordinal_is_refused():
    with pytest.raises(IndexError, match="-1"):
        source()[-1]


def test_held_out_prompts_are_the_first_rows_in_their_own_order():
    prompts = held_out(ROWS, TOKENIZER, max_prompt_tokens=32, limit=3)
    assert [(prompt.ordinal, prompt.text) for prompt in prompts] == [(0, "10+10"), (1, "11+11"), (2, "12+12")]


def test_held_out_without_a_limit_takes_all_rows():
    assert len(held_out(ROWS, TOKENIZER, max_prompt_tokens=32)) == 30


def test_more_held_out_prompts_than_rows_are_refused():
    with pytest.raises(ValueError, match="asked for 31 held-out prompts of 30 rows"):
        held_out(ROWS, TOKENIZER, max_prompt_tokens=32, limit=31)


def test_integer_answers_become_text_and_other_fields_stay():
    rows = checked_rows([{"prompt": "1-2", "answer": -1, "level": 3}, {"prompt": "2", "answer": np.int64(7)}])
    assert rows == [{"prompt": "1-2", "answer": "-1", "level": 3}, {"prompt": "2", "answer": "7"}]


def test_messages_are_kept_with_all_their_fields():
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "1+1", "name": "ada"}]
    assert checked_rows([{"prompt": messages, "answer": 2}]) == [{"prompt": messages, "answer": "2"}]


def test_messages_without_a_chat_template_name_the_row_and_the_remedy():
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}]
    with pytest.raises(ValueError, match=r"row 1: .* no chat template; use .* data\.chat=false"):
        held_out(rows, TOKENIZER, max_prompt_tokens=64)


def test_the_chat_template_counts_towards_the_limit_and_the_text_is_what_the_model_reads(chat_tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}]
    [prompt] = held_out(rows, chat_tokenizer, max_prompt_tokens=64)
    assert prompt.text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.row["prompt"] == rows[0]["prompt"]
    length = len(prompt.tokens)
    assert len(chat_tokenizer.encode("1+1")) < length == len(chat_tokenizer.encode(prompt.text))
    held_out(rows, chat_tokenizer, max_prompt_tokens=length)
    with pytest.raises(ValueError, match=f"row 0: the prompt has {length} tokens"):
        held_out(rows, chat_tokenizer, max_prompt_tokens=length - 1)


def test_rows_are_not_changed_in_place():
    given = [{"prompt": "1", "answer": 1}]
    checked_rows(given)
    assert given == [{"prompt": "1", "answer": 1}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, r"row 1: no field 'prompt'; its fields are \['answer'\]"),
        ({"prompt": "1"}, "row 1: no field 'answer'"),
        ({"prompt": 1, "answer": "1"}, "row 1: 'prompt' must be a string or a list of messages .* got 1"),
        (
            {"prompt": [], "answer": "1"},
            r"row 1: 'prompt' must be a string or a list of messages .* got \[\]",
        ),
        (
            {"prompt": [{"role": "user"}], "answer": "1"},
            "row 1: message 0: 'content' must be a string or a list of parts of text; got None",
        ),
        ({"prompt": "1", "answer": 1.0}, "row 1: 'answer' must be a string or an integer; got 1.0"),
        ({"prompt": "1", "answer": True}, "row 1: 'answer' must be .* got True"),
        ({"prompt": "1", "answer": None}, "row 1: 'answer' must be .* got None"),
        ({"prompt": " ", "answer": "1"}, "row 1: 'prompt' is empty"),
        ({"prompt": "1", "answer": ""}, "row 1: 'answer' is empty"),
    ],
)
def test_bad_row_is_named_with_its_field(row, message):
    with pytest.raises(ValueError, match=message):
        checked_rows([{"prompt": "1", "answer": "1"}, row])


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows were given"):
        checked_rows([])
    with pytest.raises(ValueError, match="no rows"):
        source([])


def test_rows_from_disk_become_prompts(data_dir):
    prompts = PromptSource(load_rows("arithmetic", "train", data_dir), TOKENIZER, seed=0, max_prompt_tokens=5)
    prompt = prompts[7100 + 5]
    left, right = prompt.text.split("+")
    assert int(left) + int(right) == int(prompt.answer)


def test_importing_the_data_package_loads_neither_grain_nor_tfds():
    code = "import sys, dapo_jax.data; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"grain", "tensorflow_datasets", "tensorflow"} & set(loaded.split())
