"""Tool calls in the formats of models."""

import json
import random
import re
import time

import pytest

from dapo_jax.environments.tool_calls import MOST_CALLS, BrokenCall, ToolCall, text_before_calls, tool_calls
from dapo_jax.environments.tool_schemas import schema_of
from dapo_jax.text.chat import ChatTemplate
from dapo_jax.text.messages import canonical_messages

ADD, NOW = ToolCall("add", {"a": 1}), ToolCall("now", {})


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
        ('<tool_call>{"name": "now"}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": " \\n"}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": "null"}</tool_call>', [NOW]),
        ('{"name": "now", "parameters": ""}', [NOW]),
        # A stop string may have cut off the end mark.
        ('I add.<tool_call>{"name": "add", "arguments": {"a": 1}}', [ADD]),
        ('<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "now"}]</tool_call>', [ADD, NOW]),
        ('{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('{"name": "add", "arguments": {"a": 1}}', [ADD]),  # as vLLM and SGLang read it
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}', [ADD] * 2),
        ('{"name": "say", "parameters": {"t": "; {"}}', [ToolCall("say", {"t": "; {"})]),
        ('{"answer": 4}', []),
        ('<think>\n<tool_call>{"name": "no"}</tool_call></think>\n{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ("thoughts that a template opened</think><tool_call>{\"name\": \"now\"}</tool_call>", [NOW]),
        ('<think>thoughts that do not end <tool_call>{"name": "add"}</tool_call>', []),
        ('perhaps <tool_call>{"name": "no"}</tool_call>?</think><tool_call>{"name": "now"}</tool_call>', [NOW]),
        ('perhaps <tool_call>{"name": "no"}</tool_call>?</think>The answer is 4.', []),
        ('<tool_call>{"name": "now"}</tool_call><think><tool_call>{"name": "no"}</tool_call>', [NOW]),
        ('{"name": "no", "parameters": {}}</think>The answer is 4.', []),
        ('[THINK]<tool_call>{"name": "no"}</tool_call>[/THINK]The answer is 4.', []),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_formats_of_qwen_and_llama_3(text, calls):
    assert tool_calls(text) == calls


def find(city: str, days: int, exact: bool, depth: float, options: dict[str, list[int]], tags: list[str], note: str | None, code: int | str) -> str:  # fmt: skip
    """Finds."""
    return city


def now() -> str:
    """Tells the time."""
    return ""


TOOLS = [schema_of(find), schema_of(now)]
JSON_CALL = '{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}'
NAMED_BLOCK = "<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```</tool_call>\n"
SPELLED = (
    "{% for k, v in f.arguments.items() %}<parameter={{ k }}>VALUE</parameter>\n{% endfor %}</function>\n"
)
TAGS = (
    "{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>NEXT<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>NEXT{% endfor %}"
)
BARE_KEYS = (
    "{% macro w(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v.items() %}{{ k }}:{{ w(x) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}["
    "{% for x in v %}{{ w(x) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
FAMILIES = {
    "qwen2.5, qwen3, smollm3, granite 4, exaone 4, ernie 4.5": ("", "<tool_call>\n" + JSON_CALL + "\n</tool_call>", "\n", ""),
    "qwen3.5": ("", "<tool_call>\n<function={{ f.name }}>\n" + SPELLED.replace("VALUE",
        "\n{% if v is mapping or v is sequence and v is not string %}{{ v | tojson }}{% else %}{{ v | string }}{% endif %}{{ '\\n' }}"
    ) + "</tool_call>", "\n", ""),
    "seed-oss": ("", "<seed:tool_call>\n<function={{ f.name }}>\n" + SPELLED.replace("VALUE", "{{ v | string }}") + "</seed:tool_call>", "\n", ""),
    "llama 3": ("", '{"name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}', "; ", ""),
    "llama 3 with its tag": ("<|python_tag|>", '{"name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}', "; ", ""),
    "mistral 0.3": ("[TOOL_CALLS] [", JSON_CALL[:-1] + ', "id": "abcdefghi"}', ", ", "]"),
    "ministral 3": ("", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", "", ""),
    "mistral small 3.2": ("", "[TOOL_CALLS]{{ f.name }}[CALL_ID]abcdefghi[ARGS]{{ f.arguments | tojson }}", "", ""),
    "granite 3": ("<|tool_call|>[", JSON_CALL, ", ", "]"),
    "granite 3.1": ("<tool_call>[", JSON_CALL, ", ", "]"),
    "phi 4 mini": ("", "<|tool_call|>" + JSON_CALL + "<|/tool_call|>", "", ""),
    "phi 4 mini without special tokens": ("functools[", JSON_CALL, ",", "]"),
    "hunyuan": ("<tool_calls>\n", NAMED_BLOCK, "", "</tool_calls>"),
    "hunyuan a13b": ("<tool_calls>[", JSON_CALL, ", ", "]</tool_calls>"),
    "glm 4": ("", "{{ f.name }}\n{{ f.arguments | tojson }}", None, ""),
    "glm 4.5": ("", "<tool_call>{{ f.name }}\n" + TAGS.replace("NEXT", "\n") + "</tool_call>", "\n", ""),
    "glm 4.7": ("", "<tool_call>{{ f.name }}" + TAGS.replace("NEXT", "") + "</tool_call>", "", ""),
    "deepseek v3, r1": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
        "\n", "<｜tool▁calls▁end｜>"),
    "deepseek v3.1": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>"),
    "nemotron nano 2": ("<TOOLCALL>[", JSON_CALL, ", ", "]</TOOLCALL>"),
    "olmo 3": ("<function_calls>\n", "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
               "{{ ', ' if not loop.last }}{% endfor %})", "\n", "\n</function_calls>"),
    "gpt-oss": ("", "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>", "", ""),
    "gpt-oss as it writes": ("<|channel|>analysis<|message|>to=functions.find is<|end|>", "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} "
        "<|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>", "", ""),
    "functiongemma": ("", BARE_KEYS.replace("QUOTE", "<escape>") + "<start_function_call>call:{{ f.name }}{{ w(f.arguments) }}<end_function_call>", "", ""),
    "gemma 4": ("", BARE_KEYS.replace("QUOTE", '<|"|>') + "<|tool_call>call:{{ f.name }}{{ w(f.arguments) }}<tool_call|>", "", ""),
}  # fmt: skip
"""Our own templates with the call formats of the families' templates: begin, one call, separator (None: one call at most) and end."""

TEXTS = [
    "Paris", "", " ", "5", "true", "null", "a\nb\n", 'it\'s "so"', "{}", "[1]", "x; {", "naïve 日本", "</tool_call>", "a, b: c", "<b>",
]  # fmt: skip


def written(family, calls):
    """A turn with so many calls in the family's format."""
    begin, call, separator, end = FAMILIES[family]
    source = (
        "{% for m in messages if m.role == 'assistant' %}" + begin + "{% for one in m.tool_calls %}{% set f = one.function %}"
        + call + "{{ '' if loop.last else separator }}{% endfor %}" + end + "{% endfor %}"
    )  # fmt: skip
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    return ChatTemplate(source, name=family).render(canonical_messages(asked), {"separator": separator or ""})


def arguments_of(rng):
    """Arguments of `find` of all types, with texts that look like other types."""
    text = lambda: rng.choice(TEXTS)  # noqa: E731
    return {
        "city": text(), "days": rng.randint(-(2**40), 2**40), "exact": rng.random() < 0.5, "depth": rng.choice([0.5, -3e-7, 1e30, 2.0]),
        "options": {"ab": [1, 2], "c": []} if rng.random() < 0.5 else {}, "tags": [text() for _ in range(rng.randint(0, 3))],
        "note": rng.choice([None, "a note"]), "code": rng.choice([7, "seven"]),
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_the_template_of_a_family_writes_is_read_back(family):
    rng = random.Random(family)
    for _ in range(30):
        count = 1 if FAMILIES[family][2] is None else rng.randint(1, 3)
        calls = [ToolCall("find", arguments_of(rng)) for _ in range(count)]
        turn = written(family, [{"name": "find", "arguments": json.dumps(call.arguments)} for call in calls])
        assert tool_calls(turn, TOOLS) == calls, turn
    for end in ("", "</s>", "<|im_end|>\n"):  # a text may have been decoded with its end token
        assert tool_calls(written(family, [{"name": "now", "arguments": {}}]) + end, TOOLS) == [NOW]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text", ["a </think> b", "<think>a</think>b", "the mark <think>", "[THINK]", "<channel|>"]
)
def test_a_text_in_a_call_may_have_the_marks_of_thoughts(family, text):
    calls = [ToolCall("find", {"city": text, "days": 5})]
    turn = written(family, [{"name": "find", "arguments": json.dumps(call.arguments)} for call in calls])
    assert tool_calls(turn, TOOLS) == calls, turn


WHOLE_TURNS = {"llama 3", "phi 4 mini without special tokens", "glm 4"}
"""Families whose calls have no mark before them, so a text before the call makes the turn an answer."""


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WHOLE_TURNS))
def test_the_text_before_a_call_has_no_mark(family):
    turn = "I look.\n" + written(family, [{"name": "now", "arguments": {}}])
    assert text_before_calls(turn, TOOLS) == "I look."


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_call_is_broken_or_absent_and_never_another_call(family):
    """A turn may end at any character. A prefix may hold the whole call without its end mark."""
    call = ToolCall("find", {"city": "a\nb {", "days": 5, "tags": ["x", "y"]})
    turn = written(family, [{"name": call.name, "arguments": dict(call.arguments)}])
    for cut in range(len(turn)):
        found = tool_calls(turn[:cut], TOOLS)
        assert found in ([], [call]) or all(isinstance(one, BrokenCall) for one in found), turn[:cut]


def test_a_spelled_value_may_contain_the_marks():
    for value in ["</tool_call>", "a</arg_value>b", "</arg_key> c", "<tool_call>now"]:
        turn = f"<tool_call>find<arg_key>city</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert tool_calls(turn * 2, TOOLS) == [ToolCall("find", {"city": value})] * 2
    for value in ["</function>", "a</parameter>b", "</tool_call>\n</function> c", "<tool_call>"]:
        turn = f"<tool_call>\n<function=find>\n<parameter=city>\n{value}\n</parameter>\n</function>\n"
        assert tool_calls(f"{turn}</tool_call>" * 2, TOOLS) == [ToolCall("find", {"city": value})] * 2


def test_a_name_without_its_bracket_has_no_line_break():
    turn = "<tool_call>\n<function=find\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    assert tool_calls(turn, TOOLS) == [ToolCall("find", {"city": "Paris"})]


@pytest.mark.parametrize("channel", ["analysis", "commentary"])
@pytest.mark.parametrize("kind", ["", " json", "<|constrain|>json", " <|constrain|>json ", " code"])
@pytest.mark.parametrize("begin", ["", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"])
def test_gpt_oss_varies_the_text_around_a_call(channel, kind, begin):
    """The recipient makes it a call, in either channel, before or after the channel. The marks are no text."""
    for header in (
        f"<|channel|>{channel} to=functions.add{kind}",
        f" to=functions.add<|channel|>{channel}{kind}",
    ):
        turn = f'{begin}{header}<|message|>{{"a": 1}}<|call|>'
        assert tool_calls(turn) == [ADD], turn
        assert text_before_calls(turn) == ("I look." if begin else ""), turn


@pytest.mark.parametrize("closed", [True, False])
def test_the_schema_of_a_client_decides_about_values_at_every_depth(closed):
    """Strict tools forbid further fields with `additionalProperties: false`, and a mapping of any values has `true`. Both are schemas."""
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": not closed}
    either = {"oneOf": [{"type": "string"}, {"type": "null"}]}
    parameters = {"type": "object", "properties": {"o": inner, "e": either}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    def read(key, text):
        [found] = tool_calls(f"<function=f><parameter={key}>{text}</parameter></function>", tools)
        return found.arguments[key]

    assert read("o", '{"x": 1}') == {"x": 1}
    assert read("o", '{"x": "1"}') == '{"x": "1"}', "x must be an integer"
    assert read("o", '{"y": "1"}') == ('{"y": "1"}' if closed else {"y": "1"})
    assert (read("e", "5"), read("e", "null")) == ("5", None)


def test_a_function_may_have_an_object_instead_of_parameters():
    """Meta describes this format for Llama 3.1."""
    assert tool_calls('<function=add>{"a": 1}</function>') == [ADD]


def test_values_without_a_schema_are_json_or_text():
    turn = "<tool_call><function=f>" + "".join(
        f"<parameter=p{at}>\n{value}\n</parameter>"
        for at, value in enumerate(["5", "True", "x y", '{"a": null}', "None", "1e999"])
    )
    expected = {"p0": 5, "p1": True, "p2": "x y", "p3": {"a": None}, "p4": None, "p5": "1e999"}
    assert tool_calls(turn + "</function></tool_call>") == [ToolCall("f", expected)]


def test_a_value_of_a_wrong_type_stays_a_text_so_that_the_policy_reads_its_error():
    turn = "<function=find><parameter=days>3.5</parameter><parameter=exact>maybe</parameter></function>"
    assert tool_calls(turn, TOOLS) == [ToolCall("find", {"days": "3.5", "exact": "maybe"})]


@pytest.mark.parametrize(
    "answer",
    ['now {"a": 1}', "find(city=1) is 2", "[now] is a list", '["now"]', "<b>x</b>", '{"name": "Bo"}', "now\nthere"],
)  # fmt: skip
def test_an_answer_that_resembles_a_call_is_an_answer(answer):
    assert tool_calls(answer, TOOLS) == []


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
        ("<tool_call>f<arg_key>a</arg_key>1</tool_call>", "has no </arg_value> before </tool_call>"),
        (
            "<tool_call>f<arg_key>a</arg_key>1</arg_value></tool_call>",
            "NAME<arg_key>KEY</arg_key><arg_value>VALUE",
        ),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>1<｜tool▁call▁end｜>", "not JSON"),
        ("<|tool_call>call:f{a:<tool_call|>", "not JSON"),
        (
            "<tool_call><function=f><parameter=a>1</function></tool_call>",
            "has no </parameter> before </function>",
        ),
        ("<function=f><parameter=a>1</parameter>", "has no </function>"),
        ("<function=f>now</function>", "not JSON"),
        ("<function=f>x<parameter=a>1</parameter></function>", "not JSON"),
        ("[TOOL_CALLS]f[ARGS]{", "not JSON"),
        ("[TOOL_CALLS]", "not JSON"),
        ("<function_calls>f(1)</function_calls>", r"NAME\(KEY=VALUE"),
        ("<function_calls>f(a=open('x'))</function_calls>", "malformed node"),
        ("<function_calls>f(a=1e999)</function_calls>", "not finite"),
        ("<function_calls>f(a=</function_calls>", "never closed|invalid syntax"),
        ("<function_calls>f(a=" + "(" * 10_000 + "</function_calls>", "nested"),
        ("<function_calls></function_calls>", r"NAME\(KEY=VALUE"),
        ('{"name": "add", "parameters": {"a": 1', "not JSON"),
        ('{"name": "add", "parameters": {}} and more', "not JSON"),
    ],
)
def test_a_malformed_call_is_a_broken_call_with_the_reason(text, reason):
    [found] = tool_calls(text)
    assert isinstance(found, BrokenCall)
    assert re.search(reason, found.reason), found.reason
    assert len(found.reason) < 300


@pytest.mark.parametrize(
    "mark",
    [
        "<tool_call>",
        "<tool_call>f<arg_key>",
        "<|tool_call>call:f{",
        "<｜tool▁call▁begin｜>",
        "<function=f>",
        "[TOOL_CALLS]",
        "<start_function_call>call:f{",
        "<function_calls>f(",
        "",
    ],
)
@pytest.mark.parametrize(
    "filler",
    [
        *(
            " ",
            "a",
            "{",
            "a:",
            "-",
            "(",
            "<parameter=a>",
            "<escape>",
            '<|"|>',
            "</arg_value>",
            "[TOOL_CALLS]",
            "<tool_call>",
            "```json",
        ),
        *("x</function>", "</parameter>\n", '{"name"'),
    ],
)
def test_a_long_malformed_turn_takes_little_time(mark, filler):
    """100,000 tokens are about 400,000 characters. A parser of quadratic time would need minutes."""
    began = time.process_time()
    found = tool_calls(mark + filler * (400_000 // len(filler)), TOOLS)
    assert time.process_time() - began < 5.0
    assert not any(isinstance(one, ToolCall) for one in found)


@pytest.mark.parametrize(
    "one", ['<tool_call>{"name": "a"}</tool_call>', '{"name": "a", "parameters": {}};', "<tool_call>"]
)
def test_a_turn_has_no_more_than_so_many_calls(one):
    found = tool_calls(one * 10_000)
    assert len(found) == MOST_CALLS + 1
    assert found[-1] == BrokenCall(f"a turn may call at most {MOST_CALLS} times")
