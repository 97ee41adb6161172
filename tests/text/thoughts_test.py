"""Thoughts are separated from the rest of a response."""

import time

import pytest

from dapo_jax.text.thoughts import without_thoughts

CALL = '<tool_call>{"name": "say", "arguments": {"t": "</tool_call> </think> \\"<think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("no marks", "no marks"),
        ("", ""),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # a chat template opened it
        ("<think>a", ""),  # cut off
        ("a</think>", ""),
        ("b <think>a", "b"),
        ("<think>a</think>b<think>c</think>d", "b d"),  # not bd
        ("<think>a<think>b</think>c", "c"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("a<think>b</think>c</think>d", "d"),  # the template opened the outer one
        ("a</think>b</think>c", "c"),
        ("<think></think>a", "a"),
        ("\n<THINK>a</THINK>b", "b"),
        ("<thinking>a</thinking>b", "b"),
        ("<thought>a</thought>b", "b"),
        ("[THINK]a[/THINK]b", "b"),
        ("<|channel>thought\na<channel|>b", "b"),
        ("a<channel|>b", "b"),
        ("<|channel>thought\na", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"),
        ("<|channel|>analysis<|message|>a", ""),
        ("<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "a b"),
        ("<|channel|>final<|message|>b", "b"),
        ("<|channel|>final <|constrain|>json<|message|>b", "b"),
        ("<|channel|>analysis code<|message|>a<|end|>b", "b"),
        ("the <|end|>", "the <|end|>"),
        ("[think] is a stage direction", "[think] is a stage direction"),
        (CALL, CALL),  # a mark in a call's arguments
        (f"a{CALL}b</think>c", "c"),
        (f"<think>a</think>{CALL}", CALL),
        ('<tool_call>{"a": "x}</tool_call>?</think><tool_call>{"a": "y"}</tool_call>', '<tool_call>{"a": "y"}</tool_call>'),
        ('<tool_call><p>5" or 6"" </p></tool_call>?</think>' + CALL, CALL),
        (f"I write <tool_call> first</think>{CALL}", CALL),
        ("I write [TOOL_CALLS] first</think>The set {1}", "The set {1}"),
        ('[TOOL_CALLS]{"a</think>[TOOL_CALLS]{"b": 1}', '[TOOL_CALLS]{"b": 1}'),
        ("I write <function=a> first</think><function=a></function>", "<function=a></function>"),
        ('<think>{"name": "a"}</think>{"name": "b"}', '{"name": "b"}'),
    ],
)  # fmt: skip
def test_the_rest_is_the_text_outside_of_all_thoughts(text, rest):
    assert without_thoughts(text).strip() == rest
    assert without_thoughts(without_thoughts(text)).strip() == rest


def test_a_response_continues_a_thought_that_its_prompt_opened():
    assert without_thoughts("7?", "<|assistant|>\n<think>\n").strip() == ""
    assert without_thoughts("7?</think>8", "<think>").strip() == "8"
    assert without_thoughts("7", "<think>\n\n</think>\n\n") == "7"
    assert without_thoughts("7", "Write <think> first.") == "7"


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "<think>",
            "</think>",
            "<think></think>",
            "[THINK]a",
            "<|channel|>analysis<|message|>",
            "<|channel|>final<|message|>",
            "<|end|><|start|>assistant",
            "<",
            "<tool_call>",
            "<tool_call></tool_call>",
            "<function=a>",
            "<function=a></function_calls>",
            "<|tool_call>",
            "[TOOL_CALLS]",
            '[TOOL_CALLS]{"',
            '[TOOL_CALLS]{"a":',
            "<start_function_call>",
            'to=functions.a<|message|>{"',
        ),
        *('<tool_call>{"', '<tool_call>{\\"', '<tool_call>{"\\"', '<tool_call>{""', "<tool_call>  "),
    ],
)
def test_time_is_linear_in_the_length(piece):
    """A quadratic search takes minutes for 200,000 marks."""
    began = time.process_time()
    without_thoughts(piece * 200_000)
    without_thoughts("<tool_call>" + piece[:1] * 1_000_000)
    assert time.process_time() - began < 10
