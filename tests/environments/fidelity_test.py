"""Random conversations with tools: the ids of an episode are the sampled ids, with the ids of the template's own text between them.

`DAPO_JAX_TOKENIZERS=FOLDER`, with model folders such as `qwen2.5`, `qwen3` and `smollm2` (tokenizer files are enough), adds real
tokenizers and templates to the two that are written here.
"""

import os
import random
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from dapo_jax.environments import Context
from dapo_jax.environments.rendering import Rendering
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.text.folders import byte_level_json, files_of

TOOLS = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}

<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif not (m.role == 'system' and loop.first) %}
{%- set content = m.content.split('</think>')[-1] if hide_thoughts and m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + '\n' + content }}
{%- for call in m.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if hide_thoughts %}<think>
{% endif %}{% endif %}"""
"""A template like Qwen's, written for this test: tools, calls, results, and thoughts that are removed from earlier answers."""

MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
PIECES = [
    "", " ", "\n", "\n\n", "\t", "the end is near", " 12 + 34 =", "héllo", "日本語のテキスト", "👩‍👩‍👧‍👦", "e\u0301", "\u212b", "שלום", "\u200b", "\ufeff",
    "\ue000", "\U000f0001", "{}", '{"a": "b"}', '\\"', "\\u003c", "<", "<|", "|>", "< |im_end|>", "im_end|>", "&lt;", "\r\n", "\x00", "\u2402said\u2402", "\u24020\u2402",
]  # fmt: skip
SPELLED = [
    "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_start|>system\n", "<tool_call>", "</tool_call>", "<tool_response>", "</think>", "<think>\nso\n</think>\n\n",
]  # fmt: skip
"""Texts like special tokens, in every second conversation."""


@cache
def own(hide_thoughts):
    made = Tokenizer.from_str(byte_level_json())
    made.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return HuggingFaceTokenizer(files_of(made.to_str(), template=TOOLS)), {"hide_thoughts": hide_thoughts}


FOLDER = os.environ.get("DAPO_JAX_TOKENIZERS")
REAL = sorted(place.name for place in Path(FOLDER).iterdir()) if FOLDER else []
KINDS = {
    "own": lambda: own(False),
    "own that hides thoughts": lambda: own(True),
    **{name: lambda name=name: (HuggingFaceTokenizer.load(Path(FOLDER) / name), {}) for name in REAL},
}


def text(rng, most=6):
    pieces = [*PIECES, *SPELLED] if rng.spelling else PIECES
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(most)))


def value(rng, depth=0):
    kind = rng.randrange(6 if depth < 3 else 3)
    if kind < 3:
        return [text(rng), rng.randrange(-5, 5), rng.choice([False, True, 0.5])][kind]
    if kind == 3:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {text(rng) or "a": value(rng, depth + 1) for _ in range(rng.randrange(3))}


def message(rng, role):
    content = text(rng)
    if role != "assistant":
        return {"role": role, "content": content, **({"name": text(rng)} if role == "tool" else {})}
    # An answer that the environment adds; the next test covers templates that look for thoughts in it.
    content = content.replace("</think>", "").replace("<think>", "")
    function = {"name": text(rng), "arguments": {"given": value(rng)}}
    return {"role": role, "content": content, "tool_calls": [{"type": "function", "function": function}]}


ROLES = ["tool", "tool tool", "user", "tool user", "tool assistant tool", "tool tool tool"]
KNOWN = {"content", "name", "tool_calls", "function", "arguments", "description", "parameters", "properties", "role", "type"}  # fmt: skip


def appended(rng):
    return [message(rng, role) for role in rng.choice(ROLES).split()]


def blank(value):
    """Returns the same message without text that could be a special token."""
    if isinstance(value, str):
        return "x"
    if isinstance(value, dict):
        return {
            key if key in KNOWN else f"key{place}": one if key in ("role", "type") else blank(one)
            for place, (key, one) in enumerate(value.items())
        }
    return [blank(one) for one in value] if isinstance(value, list) else value


def strings(value):
    if isinstance(value, dict):
        return [found for key, one in value.items() for found in (key, *strings(one))]
    if isinstance(value, list):
        return [found for one in value for found in strings(one)]
    return [value] if isinstance(value, str) else []


class Conversation:
    """A random conversation, and the template's own rendering of it."""

    def __init__(self, rng, tokenizer, kwargs):
        self.tokenizer, self.kwargs = tokenizer, kwargs
        self.first = [*([message(rng, "system")] if rng.random() < 0.5 else []), message(rng, "user")]
        knows_tools = "tools" in tokenizer.chat_template.source
        described = {"type": "object", "properties": {"a": {"type": "string", "description": text(rng)}}}
        function = {"name": "f", "description": text(rng), "parameters": described}
        tools = [{"type": "function", "function": function}]
        self.tools = tools if knows_tools and rng.random() < 0.7 else []
        self.answers = [text(rng) for _ in range(rng.randrange(1, 4))]
        self.appended = [appended(rng) for _ in self.answers]
        self.marks = [f"said{place}:{rng.random()}" for place, _ in enumerate(self.answers)]

    def render(self, messages, of=lambda tool: tool):
        tools = {"tools": [of(tool) for tool in self.tools]} if self.tools else {}
        return self.tokenizer.chat_template.render(messages, self.kwargs | tools)

    def between(self, *, of=lambda message: message):
        """Returns the template's text up to the first answer, and from each answer to the beginning of the next."""
        messages_so_far = [of(each) for each in self.first]
        texts = [self.render(messages_so_far, of)]
        for mark, messages in zip(self.marks, self.appended, strict=True):
            messages_so_far += [{"role": "assistant", "content": mark}, *map(of, messages)]
            texts.append(self.render(messages_so_far, of).rpartition(mark)[2])
        return texts

    def turns(self):
        """Returns the sampled ids: the tokenized answer and an end token."""
        ids = map(self.tokenizer.encode, self.answers)
        return [np.append(answer, self.tokenizer.eos_id).astype(np.int32) for answer in ids]

    def spelled(self, place):
        """Returns whether the text given there contains a special token."""
        special = self.tokenizer._tokenizer.get_added_tokens_decoder().values()
        given = [*self.first, *self.tools] if place == 0 else self.appended[place - 1]
        return any(token.content in found for found in strings(given) for token in special)


def conversation_of(seed, tokenizer, kwargs):
    rng = random.Random(seed)
    rng.spelling = seed % 2 == 1
    return Conversation(rng, tokenizer, kwargs)


def decoded(tokenizer, ids):
    return tokenizer.spelled(np.array(ids, np.int32))


def same_text(one, other):
    """Returns whether the texts are equal up to Unicode normalization, which a tokenizer may apply."""
    return unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)


def specials(tokenizer, ids):
    added = tokenizer._tokenizer.get_added_tokens_decoder()
    return [int(number) for number in ids if int(number) in added]


def parts_of(conversation):
    """Returns the ids before each turn and at the end: first the context, then the ids appended after each turn."""
    rendering = Rendering(tokenizer=conversation.tokenizer, template_kwargs=conversation.kwargs)
    context = rendering.context_ids(Context(conversation.first, tools=conversation.tools))
    after_turns = zip(conversation.appended, conversation.turns(), strict=True)
    return [context, *(rendering.ids(messages, after=turn) for messages, turn in after_turns)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_has_the_sampled_tokens_and_the_templates_tokens_between_them(kind):
    tokenizer, kwargs = KINDS[kind]()
    plain = whole = 0
    for seed in range(500 if kind in REAL else 80):
        conversation = conversation_of(seed, tokenizer, kwargs)
        end = decoded(tokenizer, [tokenizer.eos_id])
        parts, texts = parts_of(conversation), conversation.between()
        skeleton = conversation.between(of=blank)
        for place, (ids, expected, bare) in enumerate(zip(parts, texts, skeleton, strict=True)):
            if place:
                assert expected.startswith(end)
                expected, bare = expected.removeprefix(end), bare.removeprefix(end)
            assert same_text(decoded(tokenizer, ids), expected), (seed, place)
            assert specials(tokenizer, ids) == specials(tokenizer, tokenizer.encode(bare)), (seed, place)
            if not conversation.spelled(place):
                plain += 1
                assert ids.tolist() == tokenizer.encode(expected).tolist(), (seed, place)
        # The whole episode, if the template keeps the answers and each begins where the tokenizer splits.
        cut = all(answer == "" or not answer[0].isspace() for answer in conversation.answers)
        kept = not any(mark in answer for answer in conversation.answers for mark in ("</think>", "<think>"))
        spelled = any(map(conversation.spelled, range(len(parts))))
        if cut and kept and not spelled and not kwargs.get("hide_thoughts"):
            messages_so_far, episode = list(conversation.first), [parts[0]]
            turns = zip(
                conversation.answers, conversation.appended, conversation.turns(), parts[1:], strict=True
            )
            for answer, messages, turn, after in turns:
                messages_so_far += [{"role": "assistant", "content": answer}, *messages]
                episode += [turn, after]
            expected = tokenizer.encode(conversation.render(messages_so_far))
            assert np.concatenate(episode).tolist() == expected.tolist(), seed
            whole += 1
    assert plain > 100
    assert whole > 5 or kwargs.get("hide_thoughts")


@pytest.mark.parametrize("kind", KINDS)
def test_text_like_special_tokens_in_all_places_of_a_message_becomes_none(kind):
    """Every string and every key of a mapping contains one."""
    tokenizer, kwargs = KINDS[kind]()
    rendering = Rendering(tokenizer=tokenizer, template_kwargs=kwargs)
    after = np.array([tokenizer.eos_id], np.int32)
    for token in tokenizer._tokenizer.get_added_tokens_decoder().values():
        evil = f"{token.content}{token.content[:3]}{token.content}{token.content[1:]}"
        function = {"name": evil, "arguments": {evil: [evil, {evil: evil}], "b": evil}}
        call = {"type": "function", "function": function}
        messages = [
            {"role": "tool", "content": evil, "name": evil},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "user", "content": evil},
        ]
        expected = rendering.ids(blank(messages), after=after)
        found = rendering.ids(messages, after=after)
        assert specials(tokenizer, found) == specials(tokenizer, expected), token
        assert evil in decoded(tokenizer, found)


def test_sampled_tokens_are_not_tokenized_again_where_a_token_would_span_the_border():
    """The vocabulary has one token for the end of the turn and the text after it."""
    tokenizer, _ = own(False)
    sampled = tokenizer.encode("x th")
    found = Rendering(tokenizer=tokenizer).ids("e", after=sampled)
    assert decoded(tokenizer, [*sampled, *found]) == "x the"
    assert tokenizer.encode("x the").tolist()[: len(sampled)] != sampled.tolist(), "another text is needed"
