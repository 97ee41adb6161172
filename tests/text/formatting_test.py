"""From a question to the prompt: templates, conversations, and contradictory settings."""

import numpy as np
import pytest

from dapo_jax.config import DataConfig
from dapo_jax.text.formatting import PromptFormat, checked_messages
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.tokenizers import ByteTokenizer
from tests.text.folders import byte_level_json, files_of, with_beginning

OPENED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ASKED = [{"role": "user", "content": "1+1"}]
TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
]


def text_of(prompt, tokenizer, **options):
    return PromptFormat(DataConfig(**options)).encode(prompt, tokenizer)[0]


def test_chat_makes_a_question_a_user_s_message(chat_tokenizer):
    text, tokens = PromptFormat(DataConfig(chat=True)).encode("1+1", chat_tokenizer)
    assert text == OPENED.format("1+1")
    np.testing.assert_array_equal(tokens, chat_tokenizer.encode(text))
    assert text_of("1+1", chat_tokenizer) == "1+1"
    for chat in (False, True):
        assert text_of(ASKED, chat_tokenizer, chat=chat) == OPENED.format("1+1")


def test_the_template_goes_around_the_last_user_message(chat_tokenizer):
    text = text_of(TALK, chat_tokenizer, prompt_template="{prompt} Briefly.")
    assert "user\none?<|im_end|>" in text
    assert text.endswith(OPENED.format("two? Briefly."))


def test_the_system_prompt_opens_every_conversation(chat_tokenizer):
    opening = "<|im_start|>system\nBe brief.<|im_end|>\n"
    for prompt in ("1+1", ASKED):
        text = text_of(prompt, chat_tokenizer, chat=True, system_prompt="Be brief.")
        assert text == opening + OPENED.format("1+1")


def test_a_plain_prompt_gets_the_beginning_that_a_chat_template_writes_itself():
    """Llama 3: the post-processor adds the token to plain text, the template writes its own."""
    tokenizer = HuggingFaceTokenizer(
        files_of(
            with_beginning(byte_level_json()),
            template="{{ bos_token }}{{ messages[0].content }}",
            bos_token="<|begin_of_text|>",
        )
    )
    for chat in (False, True):
        _, tokens = PromptFormat(DataConfig(chat=chat)).encode("1+1", tokenizer)
        np.testing.assert_array_equal(tokens, [3, *tokenizer.encode("1+1")])


@pytest.mark.parametrize("prompt", ["1", ASKED])
def test_without_a_chat_template_a_conversation_is_answered_with_the_keys_to_set(prompt):
    with pytest.raises(
        ValueError, match=r"data\.chat=false.*data\.source_options.*model\.source.*chat_template\.jinja"
    ):
        text_of(prompt, ByteTokenizer(), chat=True)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (3, r"'prompt' .* got 3 \(int\)"),
        (["1+1"], "message 0 is '1\\+1'"),
        ([{"role": "user", "content": " "}], "the last user message is empty"),
        ([*ASKED, {"role": "assistant", "content": "2"}], "the last message is the assistant's"),
    ],
)
def test_messages_that_are_not_a_conversation_are_refused(messages, words):
    with pytest.raises(ValueError, match=words):
        checked_messages(messages)


def test_the_dapo_template_is_the_recipes_text_word_by_word():
    text, _ = PromptFormat(DataConfig(prompt_template="dapo")).encode("What is 1+1?", ByteTokenizer())
    assert text == (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
        "(without quotes) where $Answer is the answer to the problem.\n\nWhat is 1+1?\n\nRemember to put your answer on its "
        'own line after "Answer:".'
    )


EXAMPLES = [{"prompt": "1+1", "response": "2"}, {"prompt": "1+2", "response": "3"}]


def test_examples_of_plain_text_come_before_the_question():
    shown = PromptFormat(DataConfig(prompt_template="Q: {prompt}\nA: ", few_shot=EXAMPLES))
    text, _ = shown.encode("2+2", ByteTokenizer())
    assert text == "Q: 1+1\nA: 2\n\nQ: 1+2\nA: 3\n\nQ: 2+2\nA: "


def turns(*messages):
    """Messages as the template of `chat_tokenizer` writes them, before the response."""
    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return written + "<|im_start|>assistant\n"


def test_examples_come_before_an_earlier_conversation(chat_tokenizer):
    talk = [("system", "S"), ("user", "one?"), ("assistant", "1"), ("user", "two?")]
    history = [{"role": role, "content": text} for role, text in talk]
    shown = [talk[0], ("user", "1+1"), ("assistant", "2"), *talk[1:]]
    assert text_of(history, chat_tokenizer, few_shot=EXAMPLES[:1]) == turns(*shown)


def test_a_developer_message_comes_first_like_a_system_message(chat_tokenizer):
    asked = [{"role": "developer", "content": "S"}, *ASKED]
    assert text_of(asked, chat_tokenizer, few_shot=EXAMPLES[:1]) == turns(
        ("system", "S"), ("user", "1+1"), ("assistant", "2"), ("user", "1+1")
    )
    with pytest.raises(ValueError, match=r"data\.system_prompt"):
        text_of(asked, chat_tokenizer, system_prompt="b")
