"""Chat templates: their text, their variables and their sandbox."""

from datetime import date

import pytest

from dapo_jax.text.chat import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of SmolLM2-135M-Instruct."""
THINKING = """\
{%- set ns = namespace(asked=0) %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- set ns.asked = ns.asked + 1 %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""A short template like Qwen3's: it hides earlier thoughts, and a keyword switches thinking off."""
ASKED = [{"role": "user", "content": "1+1?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
    {"role": "user", "content": " 中\n"},
]


def render(source, messages=ASKED, **variables):
    return ChatTemplate(source, name="a/chat_template.jinja").render(messages, **variables)


def test_smollm2_opens_with_its_own_system_message():
    """From transformers 5.23: AutoTokenizer.from_pretrained(SmolLM2-135M-Instruct).apply_chat_template(ASKED,
    tokenize=False, add_generation_prompt=True)."""
    assert render(SMOLLM2) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_takes_another_system_message_instead():
    """As above, with TALK."""
    assert render(SMOLLM2, TALK) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\none and one\n</think>\n\n2<|im_end|>\n"
        "<|im_start|>user\n 中\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_is_switched_off_by_its_keyword():
    opened = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert render(THINKING) == render(THINKING, enable_thinking=True) == opened
    assert render(THINKING, enable_thinking=False) == opened + "<think>\n\n</think>\n\n"


def test_the_template_cuts_earlier_thoughts():
    assert "<|im_start|>assistant\n2<|im_end|>" in render(THINKING, TALK)


def test_json_is_plain_and_keeps_its_letters_and_its_order():
    source = (
        "{{ x | tojson }} {{ x | tojson(indent=1) }} {{ x | tojson(separators=(',', ':'), sort_keys=true) }}"
    )
    assert (
        render(source, x={"é": "<b>", "a": [1, None]})
        == '{"é": "<b>", "a": [1, null]} {\n "é": "<b>",\n "a": [\n  1,\n  null\n ]\n} {"a":[1,null],"é":"<b>"}'
    )


def test_special_tokens_are_variables_that_a_keyword_overrides():
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ pad_token }}", name="t", special_tokens={"bos_token": "<s>", "eos_token": "</s>"})  # fmt: skip
    assert template.render(ASKED) == "<s></s>"
    assert template.render(ASKED, bos_token="") == "</s>"


def test_tools_and_documents_are_none_unless_given():
    source = "{{ tools is none }}{{ documents is none }}{{ thing is defined }}"
    assert render(source) == "TrueTrueFalse"
    assert render(source, tools=[{"name": "f"}]) == "FalseTrueFalse"


def test_marks_for_training_masks_are_ignored():
    assert (
        render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}")
        == "1+1?!"
    )


def test_the_date_is_given_at_midnight_and_never_from_the_clock():
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", name="t")
    assert template.render(ASKED, today=date(2024, 7, 26)) == "26 Jul 2024 00:00"
    with pytest.raises(ValueError, match=r"data\.template_date"):
        template.render(ASKED)


def test_a_date_in_seconds_depends_on_the_machine_and_is_refused():
    with pytest.raises(ValueError, match="time zone"):
        ChatTemplate("{{ strftime_now('%s') }}", name="t").render(ASKED, today=date(2024, 7, 26))


def test_a_refusal_of_the_template_has_its_name_and_message():
    with pytest.raises(ValueError, match=r"a/chat_template\.jinja refuses the messages: unknown role tool"):
        render(THINKING, [{"role": "tool", "content": "2"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_templates_run_in_the_sandbox_of_jinja(source):
    with pytest.raises(ValueError, match=r"a/chat_template\.jinja tries to leave its sandbox"):
        render(source)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ missing.name }}", "UndefinedError: 'missing'"),
        ("{% include 'other' %}", "TypeError"),
        ("{{ range(10000000) }}", "OverflowError"),
        (
            "{{ [1, 2] | random }}",
            "TemplateAssertionError: No filter named 'random'",
        ),  # prompts are reproducible
    ],
)
def test_a_failing_template_is_named(source, error):
    with pytest.raises(ValueError, match=rf"a/chat_template\.jinja fails with {error}"):
        render(source)


def test_the_size_of_the_text_is_limited():
    with pytest.raises(ValueError, match="4,194,304 characters"):
        render("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}")


def test_a_broken_template_does_not_matter_until_it_is_used():
    assert ChatTemplate("{% if %}", name="t").source == "{% if %}"
