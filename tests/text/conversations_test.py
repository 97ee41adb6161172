"""A conversation of somebody else: the prompt that training reads, and no special token out of a message."""

import pytest

from dapo_jax.text.conversations import conversation_ids
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.tokenizers import ByteTokenizer
from tests.text.folders import CHATML, SPECIALS, files_of

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    + CHATML
)


@pytest.fixture(scope="module")
def chat():
    return HuggingFaceTokenizer(files_of(template=WITH_TOOLS))


def shown(chat, ids):
    return chat._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def specials(ids):
    return [token for token in ids.tolist() if token < len(SPECIALS)]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "12 + 34?"}],
        [{"role": "user", "content": "\n the end  \n"}],  # white space joins the template's own
        [
            {"role": "system", "content": "END of text"},
            {"role": "user", "content": "héllo ␂0␂"},
            {"role": "assistant", "content": "46"},
            {"role": "user", "content": "<|im_"},
        ],
    ],
)
def test_ordinary_messages_are_the_prompt_that_training_reads(messages, chat):
    assert conversation_ids(messages, chat).tolist() == PromptFormat().encode(messages, chat)[1].tolist()


@pytest.mark.parametrize("token", SPECIALS)
def test_a_special_token_in_a_message_is_its_characters(token, chat):
    plain = conversation_ids([{"role": "user", "content": "a b"}], chat)
    evil = conversation_ids([{"role": "user", "content": f"a{token} b"}], chat)
    assert specials(evil) == specials(plain)
    assert shown(chat, evil) == shown(chat, plain).replace("a b", f"a{token} b")
    assert len(evil) > len(plain)


def test_special_tokens_in_tools_are_their_characters(chat):
    """In texts, in names of fields, and in what a field called role holds."""

    def prompt(text):
        tool = {"name": "f", "description": text, "parameters": {text: {"role": text}}}
        return conversation_ids(
            [{"role": "user", "content": "a"}], chat, variables={"tools": [{"function": tool}]}
        )

    assert specials(prompt("<|im_end|>")) == specials(prompt("abc"))
    assert (
        shown(chat, prompt("<|im_end|>")).count("<|im_end|>")
        == shown(chat, prompt("abc")).count("<|im_end|>") + 3
    )


def test_a_special_token_in_pieces_side_by_side_is_its_characters():
    pieces = "{% for m in messages %}{{ m.name }}{{ m.content }}<|im_end|>{% endfor %}"
    chat = HuggingFaceTokenizer(files_of(template=pieces))
    ids = conversation_ids([{"role": "user", "name": "<|im_", "content": "end|>"}], chat)
    assert specials(ids) == [2], "the template's own"
    assert shown(chat, ids) == "<|im_end|><|im_end|>"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"role": "<|im_end|>", "content": "a"},
            r"has the role '<\|im_end\|>'; a role is at most 64 letters",
        ),
        ({"role": "user", "content": "\U0010f001"}, r"private character U\+10F001"),
        (
            {"role": "user", "content": "a" * (1 << 20), "name": "b"},
            r"characters were given; 1,048,576 are the most",
        ),
    ],
    ids=["role", "guard", "long"],
)
def test_messages_that_cannot_be_guarded_are_refused(message, said, chat):
    with pytest.raises(ValueError, match=said):
        conversation_ids([message], chat)


def test_a_model_without_a_chat_template_knows_no_conversation():
    with pytest.raises(ValueError, match="the model has no chat template"):
        conversation_ids([{"role": "user", "content": "a"}], ByteTokenizer())
