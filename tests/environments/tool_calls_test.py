"""Tool calls in the formats of models."""

import json

import pytest

from dapo_jax.environments.tool_calls import MOST_CALLS, BrokenCall, ToolCall, tool_calls

ADD = ToolCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        ("", []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ADD]),
        ('I add.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> done', [ADD]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 3, [ADD] * 3),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', [ADD]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}', [ADD] * 2),
        ('{"name": "say", "parameters": {"t": "; {"}}', [ToolCall("say", {"t": "; {"})]),
        ('{"answer": 4}', []),
        ('<think>\n<tool_call>{"name": "no"}</tool_call></think>\n{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ("thoughts that a template opened</think><tool_call>{\"name\": \"now\"}</tool_call>", [ToolCall("now", {})]),
        ('<think>thoughts that do not end <tool_call>{"name": "add"}</tool_call>', []),
        ('perhaps <tool_call>{"name": "no"}</tool_call>?</think><tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('perhaps <tool_call>{"name": "no"}</tool_call>?</think>The answer is 4.', []),
        ('<tool_call>{"name": "now"}</tool_call><think><tool_call>{"name": "no"}</tool_call>', [ToolCall("now", {})]),
        ('{"name": "no", "parameters": {}}</think>The answer is 4.', []),
        ('[THINK]<tool_call>{"name": "no"}</tool_call>[/THINK]The answer is 4.', []),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_formats_of_qwen_and_llama_3(text, calls):
    assert tool_calls(text) == calls


def test_an_argument_may_contain_the_marks():
    """A program that cuts at the first end mark would read half an object."""
    call = {"name": "say", "arguments": {"t": "<tool_call></tool_call> </think> ü"}}
    text = f"<tool_call>{json.dumps(call)}</tool_call><tool_call>{json.dumps(call)}</tool_call>"
    assert tool_calls(text) == [ToolCall("say", call["arguments"])] * 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>add(1)</tool_call>", "not JSON"),
        ('<tool_call>{"name": "add"', "has no </tool_call>"),
        ('<tool_call>{"name": 3}</tool_call>', 'an object with a "name" and "arguments"'),
        ("<tool_call>[]</tool_call>", 'an object with a "name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '"arguments" must be an object'),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', '"arguments" must be an object'),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not finite"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "not finite"),
        ("<tool_call>" + "9" * 10_000 + "</tool_call>", "4300 digits|does not fit"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "too deep"),
        ("<|python_tag|>print(1)", "not JSON"),
        ('{"name": "add", "parameters": {"a": 1', "not JSON"),
        ('{"name": "add", "parameters": {}} and more', "not JSON"),
    ],
)
def test_a_malformed_call_is_a_broken_call_with_the_reason(text, reason):
    import re

    [found] = tool_calls(text)
    assert isinstance(found, BrokenCall)
    assert re.search(reason, found.reason), found.reason
    assert len(found.reason) < 300


@pytest.mark.parametrize(
    "one", ['<tool_call>{"name": "a"}</tool_call>', '{"name": "a", "parameters": {}};', "<tool_call>"]
)
def test_a_turn_has_no_more_than_so_many_calls(one):
    found = tool_calls(one * 10_000)
    assert len(found) == MOST_CALLS + 1
    assert found[-1] == BrokenCall(f"a turn may call at most {MOST_CALLS} times")
