"""Fields of requests that change the tokens of the prompt, or the text of the answer."""

import json

import pytest

from dapo_jax.serving.http_requests import read_chat, read_completions, read_generate
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.text.http import RequestError
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.text.folders import byte_level_json, files_of, with_beginning

TOKENIZER = HuggingFaceTokenizer(files_of(with_beginning(byte_level_json())))
LIMITS = ServedLimits(
    model="m",
    tokenizer=TOKENIZER,
    vocabulary=400,
    max_prompt_tokens=64,
    max_response_tokens=8,
    most_responses=4,
)


def body(**fields):
    return json.dumps(fields).encode()


def test_a_text_to_complete_begins_with_the_beginning_unless_the_request_declines_it():
    plain = TOKENIZER.encode("12").tolist()
    for fields, first in (
        ({}, [3]),
        ({"add_special_tokens": True}, [3]),
        ({"add_special_tokens": False}, []),
    ):
        [asked] = read_completions(body(prompt="12", **fields), LIMITS)
        assert asked.prompt.tolist() == [*first, *plain]


@pytest.mark.parametrize(
    ("name", "value"), [("skip_special_tokens", False), ("include_stop_str_in_output", True)]
)
def test_fields_that_would_change_the_text_are_refused_except_where_the_answer_has_no_text(name, value):
    messages = [{"role": "user", "content": "1"}]
    for read, fields in ((read_chat, {"messages": messages}), (read_completions, {"prompt": "1"})):
        read(body(**fields, **{name: not value}), LIMITS)
        with pytest.raises(RequestError, match=f"'{name}'={value}"):
            read(body(**fields, **{name: value}), LIMITS)
    read_generate(body(token_ids=[5], sampling_params={name: value}), LIMITS)
