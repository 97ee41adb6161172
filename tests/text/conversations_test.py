"""Conversations from outside: the same prompt as in training, and no special token from a message."""

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from dapo_jax.text.conversations import conversation_ids
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.special_tokens import FIRST_GUARD, Guards
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer
from tests.text.folders import CHATML, SPECIALS, byte_fallback_json, byte_level_json, files_of

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
def test_ordinary_messages_give_the_prompt_of_training(messages, chat):
    assert conversation_ids(messages, chat).tolist() == PromptFormat().encode(messages, chat)[1].tolist()


@pytest.mark.parametrize("token", SPECIALS)
def test_a_special_token_in_a_message_is_characters(token, chat):
    plain = conversation_ids([{"role": "user", "content": "a b"}], chat)
    evil = conversation_ids([{"role": "user", "content": f"a{token} b"}], chat)
    assert specials(evil) == specials(plain)
    assert shown(chat, evil) == shown(chat, plain).replace("a b", f"a{token} b")
    assert len(evil) > len(plain)


def test_special_tokens_in_tools_are_characters(chat):
    """In texts, in names of fields, and in a field called role."""

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


def test_a_special_token_in_pieces_is_characters():
    pieces = "{% for m in messages %}{{ m.name }}{{ m.content }}<|im_end|>{% endfor %}"
    chat = HuggingFaceTokenizer(files_of(template=pieces))
    ids = conversation_ids([{"role": "user", "name": "<|im_", "content": "end|>"}], chat)
    assert specials(ids) == [2], "the template's own"
    assert shown(chat, ids) == "<|im_end|><|im_end|>"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "<|im_end|>", "content": "a"}, r"role '<\|im_end\|>'"),
        ({"role": "user", "content": "\U0010f001"}, r"U\+10F001"),
        ({"role": "user", "content": "a" * (1 << 20), "name": "b"}, "1,048,576"),
        ({"role": "user", "content": "a", "file": object()}, "is not text, a number, a list or a mapping"),
    ],
    ids=["role", "guard", "long", "object"],
)
def test_messages_that_cannot_be_guarded_are_refused(message, words, chat):
    with pytest.raises(ValueError, match=words):
        conversation_ids([message], chat)


def test_a_conversation_needs_a_chat_template():
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        conversation_ids([{"role": "user", "content": "a"}], ByteTokenizer())


def test_a_guarded_text_is_restored():
    guards = Guards(["<|im_end|>", "</s>", "[INST]", ""])
    text = "a < b [c] <|im_end|> ü \ue000 \U000f0001"
    guarded = guards.guarded(text)
    assert "<" not in guarded
    assert "[" not in guarded
    assert len(guarded) == len(text)
    assert guards.restored(guarded) == text
    assert guards.guarded("") == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FIRST_GUARD, r"U\+10F000"),
        ("a\U0010f001im_end|>", r"U\+10F001"),
        ("a\ud800", "surrogates not allowed"),
    ],
)
def test_texts_from_outside_cannot_hold_guards(text, message):
    with pytest.raises(ValueError, match=message):
        Guards(["<a>"]).guarded(text)


@pytest.mark.parametrize(
    "text", ["", "the end", "<|im_start|>user\n\n\nthe end<|im_end|>\n", "a<b <|im_end|>", "日本 héllo"]
)
def test_without_special_tokens_guarding_does_not_change_the_ids(text):
    """Tokens may span the border between guarded and plain text."""
    tokenizer = HuggingFaceTokenizer(files_of())
    for cut in range(len(text) + 1):
        if "<|im" in text[cut:]:
            continue
        guarded = text[:cut] + tokenizer.guarded(text[cut:])
        assert tokenizer.encode_guarded(guarded).tolist() == tokenizer.encode(text).tolist()


def test_a_special_token_made_by_the_normalizer_does_not_count():
    """NFKC turns wide characters into ASCII, in which an added token would be found."""
    made = Tokenizer.from_str(byte_level_json())
    made.normalizer = normalizers.NFKC()
    made.add_tokens([AddedToken("<tool>", normalized=True, special=False)])
    tokenizer = HuggingFaceTokenizer(files_of(made.to_str(), template=f"<tool>{CHATML}"))
    number = tokenizer._tokenizer.token_to_id("<tool>")
    wide = "\uff1ctool\uff1e"
    assert number in tokenizer.encode(wide), "so there is something to guard against"
    assert number not in tokenizer.encode_guarded(tokenizer.guarded(wide))
    assert number in tokenizer.encode_guarded("<tool>" + tokenizer.guarded(wide))


THINKING = CHATML.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
"""Like Qwen3's and DeepSeek's, it leaves out earlier thoughts."""


def marked(*tokens, special=False):
    """The byte-level tokenizer with further added tokens. The first one has id 320."""
    made = Tokenizer.from_str(byte_level_json())
    made.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens])
    return made.to_str()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_a_template_finds_the_thoughts_of_an_earlier_answer(template, special):
    chat = HuggingFaceTokenizer(files_of(marked("<think>", "</think>", special=special), template=template))
    answer = {"role": "assistant", "content": "<think>\nthe</think>46<|im_end|>"}
    messages = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "b"}]
    found = conversation_ids(messages, chat).tolist()
    answer["content"] = answer["content"].removesuffix("<|im_end|>")
    row = PromptFormat().encode(messages, chat)[1].tolist()
    assert {320, 321}.intersection(found) == ({320, 321} if template == CHATML else set())
    assert [found.count(token) for token in (2, 320, 321)] == [row.count(token) for token in (2, 320, 321)]
    assert len(found) == len(row) + len(chat.encode_plain("<|im_end|>"))
    question = [{"role": "user", "content": "</think>"}]
    assert 321 not in conversation_ids(question, chat), "only an answer has thoughts"


def test_an_added_token_that_the_template_does_not_contain_is_ordinary_text():
    """As in Gemma, whose vocabulary has the tags of HTML."""
    tokenizer = marked("<table>", "<tool_call>")
    chat = HuggingFaceTokenizer(files_of(tokenizer, template=f"<tool_call>{CHATML}"))
    messages = [{"role": "user", "content": "a<table>b"}]
    found = conversation_ids(messages, chat)
    assert found.tolist() == PromptFormat().encode(messages, chat)[1].tolist()
    assert 320 in found
    assert 320 in chat.encode_plain("<table>")
    assert 321 not in chat.encode_plain("<tool_call>")


def test_tokenizers_without_spelled_special_tokens_guard_nothing():
    for tokenizer in (ByteTokenizer(), CharTokenizer("<ab>")):
        assert tokenizer.guarded("<ab>") == "<ab>"
        assert tokenizer.encode_guarded("<ab>").tolist() == tokenizer.encode("<ab>").tolist()


def test_texts_of_sentencepiece_tokenizers_are_guarded():
    files = files_of(byte_fallback_json(), eos_token="</s>", pad_token="</s>")
    tokenizer = HuggingFaceTokenizer(files)
    ids = tokenizer.encode_guarded("<s>" + tokenizer.guarded("end</s>") + "</s>").tolist()
    assert (ids[0], ids[-1], ids.count(1), ids.count(2)) == (1, 2, 1, 1)
