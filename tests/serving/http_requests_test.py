"""Fields of requests that change the tokens of the prompt, or the text of the answer."""

import json

import numpy as np
import pytest

from dapo_jax.dapo.rollouts import Span
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.serving.http_requests import read_chat, read_completions, read_generate
from dapo_jax.serving.http_server import CompletionAnswer
from dapo_jax.serving.request_loop import NewTokens
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.text.http import RequestError
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.text.folders import byte_fallback_json, byte_level_json, files_of, with_beginning

TOKENIZER = HuggingFaceTokenizer(files_of(with_beginning(byte_level_json())))
LIMITS = ServedLimits(
    model="m",
    tokenizer=TOKENIZER,
    vocabulary=400,
    max_prompt_tokens=64,
    max_response_tokens=8,
    most_responses=4,
)


SPACED = ServedLimits(
    model="m",
    tokenizer=HuggingFaceTokenizer(files_of(byte_fallback_json(), eos_token="</s>", pad_token=None)),
    vocabulary=400,
    max_prompt_tokens=64,
    max_response_tokens=8,
    most_responses=4,
)
"""With the decoder of Llama 2, which drops the first space of a text."""


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


@pytest.mark.parametrize(("echo", "text", "first"), [(False, " END", 0), (True, "a: END", 3)])
def test_a_completion_keeps_the_space_after_its_prompt(echo, text, first):
    """Tokens are named by their text inside a text, so "▁" and "a" begin the echoed prompt."""
    [asked] = read_completions(body(prompt="a:", echo=echo, logprobs=0, max_tokens=1, temperature=0), SPACED)
    ids = np.concatenate([asked.prompt, SPACED.tokenizer.encode(" END", asked.prompt)])[
        0 if echo else len(asked.prompt) :
    ]
    answer = CompletionAnswer(asked, SPACED)
    answer.add(NewTokens(0, Tokens(ids), (Span(0, 0),), "length"))
    [choice] = answer.whole()["choices"]
    assert choice["text"] == text
    assert choice["logprobs"]["tokens"] == [" ", "a", ":", " EN", "D"][-len(ids) :]
    assert choice["logprobs"]["text_offset"][first:] == [len(text) - 4, len(text) - 1]
