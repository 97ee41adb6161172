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
ASKED = [{"role": "user", "content": "1+1?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
    {"role": "user", "content": " 中\n"},
]


def render(source, messages=ASKED, **variables):
    return ChatTemplate(source, name="a/chat_template.jinja").render(messages, variables)


def test_smollm2_opens_with_its_own_system_message():
    """From transformers 5.23: AutoTokenizer.from_pretrained(SmolLM2-135M-Instruct).apply_chat_template(ASKED,
    tokenize=False, add_generation_prompt=True)."""
    assert render(SMOLLM2) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["self", "loop", "caller", "range", "a b"])
def test_a_variable_may_have_any_name(name):
    """A request chooses the names. They must not collide with the arguments of Jinja's own functions."""
    assert render(SMOLLM2, **{name: 1}) == render(SMOLLM2)


def test_smollm2_takes_another_system_message_instead():
    """As above, with TALK."""
    assert render(SMOLLM2, TALK) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\none and one\n</think>\n\n2<|im_end|>\n"
        "<|im_start|>user\n 中\n<|im_end|>\n<|im_start|>assistant\n"
    )


JSON = "{{ x | tojson }} {{ x | tojson(indent=1) }} {{ x | tojson(separators=(',', ':'), sort_keys=true) }}"
TOOLS = "{{ tools is none }} {{ documents is none }} {{ thing is defined }}"
THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}2"


@pytest.mark.parametrize(
    ("source", "variables", "text"),
    [
        (
            JSON,
            {"x": {"é": "<b>", "a": [1]}},
            '{"é": "<b>", "a": [1]} {\n "é": "<b>",\n "a": [\n  1\n ]\n} {"a":[1],"é":"<b>"}',
        ),
        (TOOLS, {}, "True True False"),
        (TOOLS, {"tools": [{"name": "f"}]}, "False True False"),
        (THINKING, {"enable_thinking": False}, "<think></think>2"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}",
            {},
            "1+1?!",
        ),
    ],
)
def test_templates_have_what_transformers_gives_them(source, variables, text):
    assert render(source, **variables) == text


def test_special_tokens_are_variables_that_a_keyword_overrides():
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ pad_token }}", name="t", special_tokens={"bos_token": "<s>", "eos_token": "</s>"})  # fmt: skip
    assert template.render(ASKED) == "<s></s>"
    assert template.render(ASKED, {"bos_token": ""}) == "</s>"


def test_the_date_is_given_at_midnight_and_never_from_the_clock():
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", name="t")
    assert template.render(ASKED, today=date(2024, 7, 26)) == "26 Jul 2024 00:00"
    with pytest.raises(ValueError, match=r"data\.template_date"):
        template.render(ASKED)
    with pytest.raises(ValueError, match="time zone"):
        ChatTemplate("{{ strftime_now('%s') }}", name="t").render(ASKED, today=date(2024, 7, 26))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_run_in_the_sandbox_of_jinja(source):
    with pytest.raises(ValueError, match=r"a/chat_template\.jinja tries to leave its sandbox"):
        render(source)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('unknown role') }}", "refuses the messages: unknown role"),
        ("{{ missing.name }}", "fails with UndefinedError: 'missing'"),
        ("{{ range(10000000) }}", "fails with OverflowError"),
        (
            "{{ [1, 2] | random }}",
            "fails with TemplateAssertionError: No filter named 'random'",
        ),  # prompts are reproducible
    ],
)
def test_a_failing_template_is_named(source, error):
    with pytest.raises(ValueError, match=rf"a/chat_template\.jinja {error}"):
        render(source)


def test_the_size_of_the_text_is_limited():
    with pytest.raises(ValueError, match="4,194,304 characters"):
        render("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}")


def test_a_broken_template_does_not_matter_until_it_is_used():
    assert ChatTemplate("{% if %}", name="t").source == "{% if %}"
