"""A conversation has the same tokens in a training row, over HTTP, as a `Context`, and as answers of an environment.

Some tokenizers add a space at the beginning of a text, or of each part between special tokens. So a text that is encoded in pieces may differ from the whole.
"""

import json
from itertools import product

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from dapo_jax.data.prompts import PairSource, PromptSource
from dapo_jax.environments import Context
from dapo_jax.environments.rendering import Rendering
from dapo_jax.serving.http_requests import read_chat
from dapo_jax.serving.served_requests import ServedLimits
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.text.folders import byte_fallback_json, byte_level_json, files_of

BYTES, PIECES = json.loads(byte_level_json())["model"], json.loads(byte_fallback_json())["model"]
SPACE = "▁"
SPLITS = {
    "byte level": (BYTES, None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte level with a space": (BYTES, None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace always": (PIECES, None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace first": (PIECES, None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace first, whole": (PIECES, None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace never": (PIECES, None, pre_tokenizers.Metaspace(prepend_scheme="never")),
    "prepend": (PIECES, [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)], None),
    "prepend and NFKC": (
        PIECES,
        [normalizers.NFKC(), normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)],
        pre_tokenizers.Metaspace(prepend_scheme="first"),
    ),
    "replace": (PIECES, [normalizers.Replace(" ", SPACE)], None),
    "strip": (BYTES, [normalizers.Strip()], pre_tokenizers.ByteLevel(add_prefix_space=False)),
}
FLAGS = {"plain": {}} | {flag: {flag: True} for flag in ("normalized", "rstrip", "lstrip")}
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    "begins with text": "Talk\n{% for m in messages %}<|im_start|> {{ m.role }}: {{ m.content }} <|im_end|>{% endfor %}<|im_start|>",
    "ends with text": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}assistant:",
    "markers around text": "<|begin_of_text|>{% for m in messages %}{% if m.role == 'user' %}[a] {{ m.content }} [/a]{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    "content after a token": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>",
}  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>")
ORDINARY = ("[a]", "[/a]")
ANSWER = "ENDx"
CONVERSATION = [
    {"role": "user", "content": "the end of  a <text>"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": " is near\n\n(END) \n"},
]


def tokenizer_of(split, flags, template):
    model, steps, before = SPLITS[split]
    kind = {key: value for key, value in model.items() if key in ("vocab", "unk_token", "byte_fallback")}
    made = Tokenizer(models.BPE(**kind, merges=[tuple(pair) for pair in model["merges"]]))
    made.normalizer = normalizers.Sequence(steps or [])
    if before is not None:
        made.pre_tokenizer = before
    made.add_special_tokens([AddedToken(text, special=True, **FLAGS[flags]) for text in SPECIAL])
    made.add_tokens([AddedToken(text, special=False, **FLAGS[flags]) for text in ORDINARY])
    made.add_tokens([AddedToken("\n\n", special=False, normalized=False)])  # as in Gemma
    return HuggingFaceTokenizer(files_of(made.to_str(), template=TEMPLATES[template]))


def row(tokenizer, messages):
    return PromptFormat().encode(messages, tokenizer)[1].tolist()


def over_http(tokenizer, messages):
    limits = ServedLimits(
        model="m", tokenizer=tokenizer, vocabulary=1000, max_prompt_tokens=1000, max_response_tokens=9, most_responses=1
    )  # fmt: skip
    return read_chat(json.dumps({"messages": messages}).encode(), limits).prompt.tolist()


def split_at(tokenizer, text, end):
    """The tokens of the first `end` characters of a text, and the tokens after them, by the offsets of `tokenizers`."""
    found = tokenizer._tokenizer.encode(text, add_special_tokens=False)
    assert not any(begin < end < stop for begin, stop in found.offsets), "a token spans the border"
    first = next(place for place, (begin, _) in enumerate(found.offsets) if begin >= end)
    return found.ids[:first], found.ids[first:]


every = pytest.mark.parametrize("split", SPLITS)


@every
def test_a_conversation_has_the_same_tokens_in_every_place(split):
    for flags, template in product(FLAGS, TEMPLATES):
        tokenizer, case = tokenizer_of(split, flags, template), (flags, template)
        rendering = Rendering(tokenizer=tokenizer)
        for messages in (CONVERSATION, CONVERSATION[:1]):
            expected = row(tokenizer, messages)
            assert over_http(tokenizer, messages) == expected, case
            assert rendering.context_ids(Context(messages)).tolist() == expected, case
        text = tokenizer.chat_template.render(CONVERSATION)
        before, after = split_at(tokenizer, text, text.index(ANSWER) + len(ANSWER))
        turn = np.array(before[-4:], np.int32)
        assert rendering.ids(CONVERSATION[2:], after=turn).tolist() == after, case
        if tokenizer._added.get(after[0]) in SPECIAL:  # the turn ends with the token that the template writes
            ended = np.append(turn, after[0])
            assert rendering.ids(CONVERSATION[2:], after=ended).tolist() == after[1:], case


@every
@pytest.mark.parametrize("last", [ANSWER, "<|im_end|>"])
def test_a_text_is_appended_as_it_would_be_tokenized_within_the_whole(split, last):
    tokenizer, turn, text = tokenizer_of(split, "plain", "chatml"), f"a guess {last}", "\nToo low: END"
    before, after = split_at(tokenizer, turn + text, len(turn))
    assert Rendering(tokenizer=tokenizer).ids(text, after=np.array(before, np.int32)).tolist() == after


@every
def test_a_demonstration_is_tokenized_as_the_continuation_of_its_prompt(split):
    asked = [{"prompt": CONVERSATION[:1], "answer": "-", "response": ANSWER}]
    for flags, template in product(FLAGS, TEMPLATES):
        tokenizer = tokenizer_of(split, flags, template)
        prompts = PromptSource(asked, tokenizer, seed=0, max_prompt_tokens=200)
        prompt, response = PairSource(prompts, tokenizer, seed=0, max_response_tokens=50)[0]
        text = tokenizer.chat_template.render(CONVERSATION[:1]) + ANSWER
        assert [*prompt, *response[:-1]] == tokenizer.encode(text).tolist(), (flags, template)


@every
def test_a_message_that_spells_a_special_token_does_not_change_the_tokens_around_it(split):
    """The special tokens are the template's. Between them, there are the tokens of a tokenizer that does not know the spelled token."""
    tokenizer = tokenizer_of(split, "plain", "content after a token")
    file = tokenizer.files["tokenizer.json"].decode()
    ignorant = Tokenizer.from_str(file.replace("<|endoftext|>", "<|other|>"))
    messages = [{"role": "user", "content": "END <|endoftext|> the end"}, *CONVERSATION[1:]]
    expected = ignorant.encode(tokenizer.chat_template.render(messages), add_special_tokens=False).ids
    assert over_http(tokenizer, messages) == expected
