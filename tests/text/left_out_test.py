"""A message that a chat template leaves out is refused by its index and role, in training rows, over HTTP and in environments."""

import json

import numpy as np
import pytest

from dapo_jax.data.prompts import held_out
from dapo_jax.environments import Context
from dapo_jax.environments.calls import LostError
from dapo_jax.environments.rendering import Rendering
from dapo_jax.serving.http_requests import read_chat
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.text.http import RequestError
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.text.folders import CHATML, files_of

ROLES = """
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + m.content }}{% for call in m.tool_calls %}<call>{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}<|im_start|>assistant
"""
"""As in Qwen's templates, a message of an unknown role has no branch, so it disappears. Written for this test."""
WITHOUT_CALLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FIRST_CALL = "{% for m in messages %}<|im_start|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}{% endfor %}"
CALLS_OR_TEXT = "{% for m in messages %}<|im_start|>{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
LAST_TWO = "{% for m in messages[-2:] %}<|im_start|>{{ m.content }}{% endfor %}"
AS_JSON = "{% for m in messages %}{{ m.content | trim | tojson(ensure_ascii=True) | upper }}{% endfor %}"
LATER_THOUGHTS = "{% for m in messages %}<|im_start|>{{ m.content if loop.last else m.content.split('[/think]')[-1] }}{% endfor %}"
MERGED = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ first if loop.first }}{{ m.content }}{% endfor %}"
)
PARTS = "{% for m in messages %}<|im_start|>{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"
REFUSES_MARKS = "{% for m in messages %}{{ raise_exception('seven digits') if m.role == 'tool' and m.content | length != 7 }}{{ m.content }}{% endfor %}"
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "[think]so[/think]a"}
TOOL = {"role": "tool", "content": "4"}


def calling(*names, content=None):
    calls = [{"type": "function", "function": {"name": name, "arguments": '{"a": 1}'}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def tokenizer_of(template, **config):
    return HuggingFaceTokenizer(files_of(template=template, **config))


def row(tokenizer, messages):
    [prompt] = held_out([{"prompt": messages, "answer": "-"}], tokenizer, max_prompt_tokens=4000)
    return prompt.tokens.tolist()


def over_http(tokenizer, messages, **fields):
    limits = ServedLimits(
        model="m", tokenizer=tokenizer, vocabulary=400, max_prompt_tokens=4000, max_response_tokens=9, most_responses=1
    )  # fmt: skip
    return read_chat(json.dumps({"messages": messages, **fields}).encode(), limits).prompt.tolist()


def context(tokenizer, messages):
    return Rendering(tokenizer=tokenizer).context_ids(Context(messages)).tolist()


PLACES = (row, over_http, context)


@pytest.mark.parametrize(
    ("template", "messages", "index", "role"),
    [
        (ROLES, [USER, calling("f"), TOOL, USER], 2, "tool"),
        (ROLES, [USER, {"role": "function", "content": "4"}, USER], 1, "function"),
        (ROLES, [USER, {"role": "tool", "content": ""}, USER], 1, "tool"),
        (ROLES, [USER, {"role": "system", "content": "s"}, USER], 1, "system"),
        (ROLES, [USER, {"role": "developer", "content": "s"}, USER], 1, "developer"),
        (
            ROLES,
            [{"role": "system", "content": "s"}, {"role": "developer", "content": "s"}, USER],
            1,
            "developer",
        ),
        (WITHOUT_CALLS, [USER, calling("f"), USER], 1, "assistant"),
        (WITHOUT_CALLS, [USER, calling("f", content="let me see"), TOOL], 1, "assistant"),
        (FIRST_CALL, [USER, calling("f", "g"), USER], 1, "assistant"),
        (LAST_TWO, [USER, ANSWER, {"role": "user", "content": "q q"}], 0, "user"),
        (LAST_TWO, [USER, ANSWER, USER], 0, "user"),
        (PARTS, [USER], 0, "user"),
        (MERGED, [USER, {"role": "system", "content": "s"}, USER], 1, "system"),
    ],
)
def test_a_message_that_a_template_leaves_out_is_refused(template, messages, index, role):
    tokenizer = tokenizer_of(template)
    for place in PLACES:
        with pytest.raises(
            (ValueError, LostError, RequestError), match=rf"message {index} \(role '{role}'\)"
        ) as refused:
            place(tokenizer, messages)
        assert getattr(refused.value, "status", 400) == 400


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (ROLES, [{"role": "system", "content": "s"}, USER, ANSWER, USER]),
        (ROLES, [USER, calling("f", "g"), USER]),
        (ROLES, [USER, calling("f"), {"role": "system", "content": " "}, USER]),
        (CALLS_OR_TEXT, [USER, calling("f", content="let me see"), USER]),
        (AS_JSON, [{"role": "user", "content": ' "q"\n'}, {"role": "assistant", "content": ""}, USER]),
        (LATER_THOUGHTS, [USER, ANSWER, USER]),
        (LATER_THOUGHTS, [USER, {"role": "assistant", "content": "[think]so[/think]"}, USER]),
        (MERGED, [{"role": "system", "content": "s"}, USER]),
        (REFUSES_MARKS, [USER, {"role": "tool", "content": "1234567"}, USER]),
        ("{#- leaves out messages on purpose -#}" + LAST_TWO, [USER, ANSWER, USER]),
        (WITHOUT_CALLS, [{"role": "user", "content": [{"type": "text", "text": "q"}]}]),
    ],
)
def test_a_conversation_that_a_template_contains_in_full_is_rendered_as_it_is(template, messages):
    tokenizer = tokenizer_of(template)
    found = [place(tokenizer, messages) for place in PLACES]
    assert found[0] == found[1] == found[2]
    canonical = [{**one, "content": one["content"] or ""} for one in messages]
    for one in canonical:
        one["content"] = one["content"][0]["text"] if isinstance(one["content"], list) else one["content"]
        for call in one.get("tool_calls", []):
            call["function"]["arguments"] = {"a": 1}
    assert found[0] == tokenizer.encode(tokenizer.chat_template.render(canonical)).tolist()


def test_a_developer_is_the_system_for_a_template_that_does_not_know_developers():
    asked = [{"role": "developer", "content": "Be brief."}, USER]
    for place in PLACES:
        for template in (ROLES, CHATML):
            tokenizer = tokenizer_of(template)
            assert place(tokenizer, asked) == place(tokenizer, [{**asked[0], "role": "system"}, USER])
        knows = tokenizer_of(CHATML + "{% if messages[0].role == 'developer' %}{% endif %}")
        assert place(knows, asked) != place(knows, [{**asked[0], "role": "system"}, USER])


@pytest.mark.parametrize("content", ["4", ""])
def test_a_message_that_an_environment_appends_is_refused_by_its_index_among_the_appended_messages(content):
    rendering = Rendering(tokenizer=tokenizer_of(ROLES))
    with pytest.raises(LostError, match=r"message 1 \(role 'tool'\)"):
        rendering.ids([USER, {"role": "tool", "content": content}], after=np.array([9], np.int32))


NAMED = {
    "default": CHATML,
    "tool_use": "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("named", [NAMED, [{"name": name, "template": text} for name, text in NAMED.items()]])
def test_tools_select_the_template_named_tool_use(named):
    tokenizer = tokenizer_of(None, chat_template=named)
    tools = [{"type": "function", "function": {"name": "f"}}]
    written = f"{json.dumps(tools)}<|im_start|>user q"
    assert over_http(tokenizer, [USER], tools=tools) == tokenizer.encode(written).tolist()
    assert context(tokenizer, [USER]) == over_http(tokenizer, [USER], tools=tools, tool_choice="none")
    assert over_http(tokenizer, [USER]) == tokenizer.encode(tokenizer.chat_template.render([USER])).tolist()
    rendering = Rendering(tokenizer=tokenizer)
    assert rendering.context_ids(Context([USER], tools=tools)).tolist() == tokenizer.encode(written).tolist()
    appended = rendering.ids([TOOL], after=np.array([9], np.int32))
    assert appended.tolist() == tokenizer.encode("<|im_start|>tool 4").tolist()


def test_tools_are_refused_over_http_if_the_template_has_no_variable_for_them():
    with pytest.raises(RequestError, match="`tools`"):
        over_http(tokenizer_of(CHATML), [USER], tools=[{"type": "function", "function": {"name": "f"}}])
