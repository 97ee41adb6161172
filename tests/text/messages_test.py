"""The canonical form of messages: data rows, environments and HTTP requests make the same prompt of the same list."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dapo_jax.data.files import file_rows
from dapo_jax.data.rows import checked_row
from dapo_jax.environments import Context
from dapo_jax.environments.calls import LostError
from dapo_jax.environments.rendering import Rendering
from dapo_jax.environments.tools import conversation
from dapo_jax.environments.turns_as_json import appended_as_json, appended_of
from dapo_jax.serving.http_requests import read_chat
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.http import RequestError
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.messages import canonical_messages
from tests.text.folders import files_of

QWEN = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}{{ raise_exception('the content is not text') }}{% endif %}
{%- if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.name is defined %}({{ m.name }}){% endif %}
{%- if m.tool_calls %}{% for call in m.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson(sort_keys=True) }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like Qwen's: it prints a name that is defined, even if it is null."""
LLAMA = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if 'tool_calls' in m %}
{%- if not m.tool_calls|length == 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson(sort_keys=True) }}}
{%- else %}{{ m.content | trim }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like Llama 3.1's: a key `tool_calls` holds one call."""


def wrapped(name, arguments, **others):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **others}


def talk(*messages):
    return [{"role": "user", "content": "1+1"}, *messages, {"role": "user", "content": "so?"}]


ONE = {"a": 1, "b": ["x", {"c": True}]}
LISTS = {
    "plain": talk(),
    "null fields": talk({"role": "assistant", "content": "2", "tool_calls": None, "refusal": None, "name": None}),
    "parts": talk({"role": "assistant", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "!"}]}),
    "no parts": talk({"role": "assistant", "content": "", "tool_calls": []}),
    "arguments as an object": talk({"role": "assistant", "content": None, "tool_calls": [wrapped("f", ONE)]}),
    "arguments as text": talk({"role": "assistant", "content": None, "tool_calls": [wrapped("f", json.dumps(ONE))]}),
    "arguments as text with a null": talk({"role": "assistant", "content": None, "tool_calls": [wrapped("f", '{"a": null}')]}),
    "arguments with a null": talk({"role": "assistant", "content": None, "tool_calls": [wrapped("f", {"a": None, "b": {"c": None, "d": 1}})]}),
    "empty arguments": talk({"role": "assistant", "tool_calls": [wrapped("f", "")]}),
    "a flat call": talk({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}),
    "two kinds of calls": talk(
        {"role": "assistant", "content": None, "tool_calls": [wrapped("f", {"a": 1})]},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "content": None, "tool_calls": [wrapped("g", {"b": {"c": "x"}})]},
        {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "c1"},
    ),
    "thoughts": talk({"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}),
}  # fmt: skip


def as_data(messages, tokenizer, folder):
    """The prompt of a row, and of an environment that returns the row's messages, through Arrow if it can hold them."""
    try:
        table = pa.table({"prompt": [messages], "answer": ["2"]})
    except pa.ArrowException:  # a content that is a text here and a list there
        path = folder / "rows.jsonl"
        path.write_text(json.dumps({"prompt": messages, "answer": "2"}))
    else:
        path = folder / "rows.parquet"
        parquet.write_table(table, path)
    [(_, fields)] = file_rows(path)
    row = checked_row(fields)
    rendering = Rendering(tokenizer=tokenizer)
    played = appended_of(json.loads(json.dumps(appended_as_json(Context(conversation(row))))))
    return PromptFormat().encode(row["prompt"], tokenizer)[1].tolist(), rendering.context_ids(played).tolist()


def as_request(messages, tokenizer):
    limits = ServedLimits(
        model="m", tokenizer=tokenizer, vocabulary=tokenizer.vocab_size, max_prompt_tokens=4096, max_response_tokens=8, most_responses=1,
    )  # fmt: skip
    return read_chat(json.dumps({"messages": messages}).encode(), limits).prompt.tolist()


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
@pytest.mark.parametrize("name", LISTS)
def test_a_row_an_environment_and_a_request_make_one_prompt_of_one_list(name, template, tmp_path):
    tokenizer = HuggingFaceTokenizer(files_of(template=template))
    data, replayed = as_data(LISTS[name], tokenizer, tmp_path)
    played = Rendering(tokenizer=tokenizer).context_ids(Context(LISTS[name])).tolist()
    assert data == replayed == played == as_request(LISTS[name], tokenizer)
    assert "None" not in (text := tokenizer.decode(np.array(data)))
    assert 'arguments": "' not in text


def test_appended_messages_are_made_canonical():
    tokenizer = HuggingFaceTokenizer(files_of(template=QWEN))
    rendering, end = Rendering(tokenizer=tokenizer), tokenizer.encode("<|im_end|>")
    loose = [{"role": "tool", "content": [{"type": "text", "text": "4"}], "name": None, "tool_calls": None}]
    strict = [{"role": "tool", "content": "4"}]
    assert rendering.ids(loose, after=end).tolist() == rendering.ids(strict, after=end).tolist()


def test_the_canonical_form_is_the_documented_one():
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": {}}}}
    given = [
        {"role": "assistant", "tool_calls": ({"name": "f", "arguments": '{"a": null, "b": {}}'},), "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "4", "image_url": None}], "extra": {"x": None, "y": [None]}},
        {"role": "assistant", "content": "2", "tool_calls": [], "reasoning": "r"},
    ]  # fmt: skip
    assert canonical_messages(given) == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "extra": {"y": [None]}},
        {"role": "assistant", "content": "2", "reasoning": "r", "reasoning_content": "r"},
    ]


BROKEN = [
    ({"role": "assistant", "tool_calls": [wrapped("f", "{")]}, "message 1: tool call 0: its arguments are not JSON"),
    ({"role": "assistant", "tool_calls": [wrapped(None, {})]}, "tool call 0: the name of its function must be a string"),
    ({"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}, "message 1 has 'function_call'"),
    ({"role": "assistant", "content": None}, "message 1: 'content' must be a string"),
    ({"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}, "message 1: 'content' has the part"),
    ({"role": "assistant", "content": "", "x": json.loads("[" * 70 + "]" * 70)}, "nested more than 64 levels"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "words"), BROKEN, ids=lambda value: str(value)[:60])
def test_messages_without_a_canonical_form_are_refused_everywhere(message, words):
    tokenizer = HuggingFaceTokenizer(files_of(template=QWEN))
    messages = talk(message)
    with pytest.raises(ValueError, match=r"message 1|64 levels") as refused:
        checked_row({"prompt": messages, "answer": "2"})
    assert words in str(refused.value)
    with pytest.raises(LostError) as lost:
        Rendering(tokenizer=tokenizer).context_ids(Context(messages))
    assert words in str(lost.value)
    with pytest.raises(RequestError) as answered:
        as_request(messages, tokenizer)
    assert (answered.value.status, words in str(answered.value)) == (400, True)


def test_an_observation_is_added_to_the_text_of_the_last_message():
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "go"}]}]}
    assert conversation(row, ": left")[-1]["content"] == "go: left"
