"""Chat templates: what they print, what they may ask for, and that they cannot leave the sandbox."""

from datetime import date

import pytest

from dapo_jax.text.chat import ChatTemplate

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""That of SmolLM2-135M-Instruct."""
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
"""Written for this test in the manner of Qwen3's: it hides earlier thoughts, and a keyword switches thinking off."""
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


def test_earlier_thoughts_are_cut_as_the_template_says():
    assert "<|im_start|>assistant\n2<|im_end|>" in render(THINKING, TALK)


def test_blocks_on_lines_of_their_own_leave_no_white_space():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_loops_may_be_left():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_json_is_plain_and_keeps_its_letters_and_its_order():
    source = (
        "{{ x | tojson }} {{ x | tojson(indent=1) }} {{ x | tojson(separators=(',', ':'), sort_keys=true) }}"
    )
    assert (
        render(source, x={"é": "<b>", "a": [1, None]})
        == '{"é": "<b>", "a": [1, null]} {\n "é": "<b>",\n "a": [\n  1,\n  null\n ]\n} {"a":[1,null],"é":"<b>"}'
    )


def test_special_tokens_are_known_by_name_and_a_keyword_goes_before_them():
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ pad_token }}", name="t", special_tokens={"bos_token": "<s>", "eos_token": "</s>"})  # fmt: skip
    assert template.render(ASKED) == "<s></s>"
    assert template.render(ASKED, bos_token="") == "</s>"


def test_tools_and_documents_are_none_unless_given():
    source = "{{ tools is none }}{{ documents is none }}{{ thing is defined }}"
    assert render(source) == "TrueTrueFalse"
    assert render(source, tools=[{"name": "f"}]) == "FalseTrueFalse"


def test_marks_for_training_masks_are_passed_over():
    assert (
        render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}")
        == "1+1?!"
    )


def test_the_date_is_the_one_given_at_midnight_and_never_the_clock_s():
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", name="t")
    assert template.render(ASKED, today=date(2024, 7, 26)) == "26 Jul 2024 00:00"
    with pytest.raises(ValueError, match=r"none was given: set data\.template_date"):
        template.render(ASKED)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ [1, 2, 3] | random }}", "the filter random draws anew each time"),
        ("{{ [[1, 2]] | map('random') | list }}", "the filter random draws anew each time"),
        ("{{ strftime_now('%s') }}", "depends on the time zone"),
        ("{{ cycler('a') }}", "whose address is another in each process"),
        ("{{ strftime_now }}", "whose address is another in each process"),
        ("{{ messages[0].content }}{{ cycler('a') }}", "whose address is another in each process"),
        ("{{ raise_exception | string }}", "whose address is another in each process"),
        ("{{ messages | map('upper') }}", "whose address is another in each process"),
    ],
)
def test_what_would_print_another_text_next_time_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, name="t").render(ASKED, today=date(2024, 7, 26))


def test_a_question_may_speak_of_an_address():
    asked = [{"role": "user", "content": "what is <function f at 0x7f00>?"}]
    assert render("{{ messages[0].content }}", asked) == "what is <function f at 0x7f00>?"


def test_the_template_s_own_refusal_names_the_template_and_its_words():
    with pytest.raises(
        ValueError, match=r"template a/chat_template\.jinja refuses the messages: unknown role tool"
    ):
        render(THINKING, [{"role": "tool", "content": "2"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{% if ''.__class__ %}x{% endif %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ dict.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_a_template_that_reaches_for_python_is_refused(source):
    with pytest.raises(ValueError, match=r"template a/chat_template\.jinja tries to leave its sandbox"):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "fails with TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "fails with TypeError"),
        ("{{ missing.name }}", "fails with UndefinedError: 'missing' is undefined"),
        ("{% include 'other' %}", "fails with TypeError"),
        ("{{ range(10000000) }}", "fails with OverflowError"),
    ],
)
def test_a_template_that_fails_is_named(source, message):
    with pytest.raises(ValueError, match=rf"template a/chat_template\.jinja {message}"):
        render(source)


def test_a_broken_template_is_no_matter_until_it_is_used():
    assert ChatTemplate("{% if %}", name="t").source == "{% if %}"


def test_the_messages_stay_as_they_were():
    messages = [{"role": "user", "content": "1", "parts": [1, (2, None)]}]
    assert render("{{ messages[0].parts }}", messages) == "[1, [2, None]]"
    assert messages == [{"role": "user", "content": "1", "parts": [1, (2, None)]}]


def test_objects_with_methods_are_kept_from_templates():
    with pytest.raises(ValueError, match="is not text, a number, a list or a mapping"):
        render("{{ file }}", file=object())
