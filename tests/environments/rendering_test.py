"""Texts, ids and messages become ids; nothing is tokenized twice, and a tool's text contains no special token."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

import dapo_jax
from dapo_jax.environments import Context
from dapo_jax.environments.calls import LostError
from dapo_jax.environments.rendering import Rendering
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer
from tests.text.folders import CHATML, byte_level_json, files_of, with_beginning
from tests.text.stop_strings_test import ids_of

NOTHING = np.zeros(0, np.int32)
ASKED, ANSWER = {"role": "user", "content": "q"}, {"role": "user", "content": "4"}


def test_a_text_and_ids_are_appended_unchanged():
    rendering = Rendering(tokenizer=ByteTokenizer())
    assert rendering.ids("A=", after=NOTHING).tolist() == [67, 63]
    assert rendering.ids([5, 7], after=None).tolist() == [5, 7]
    assert rendering.ids(np.array([9]), after=NOTHING).tolist() == [9]
    for nothing in ("", [], (), NOTHING):
        assert rendering.ids(nothing, after=NOTHING).tolist() == []


@pytest.mark.parametrize(
    ("appended", "message"),
    [
        (7, r"7 \(int\) cannot be appended"),
        ([1, "a"], "not a list of messages or ids"),
        ([[1], [2]], "not a list of messages or ids"),
        ([1.5], "not a list of messages or ids"),
        ([-1], "ids from -1 to -1 .* from 0 to 257"),
        ([300], "ids from 300 to 300"),
        ("\ud800", "cannot be tokenized"),
        ("a" * (1 << 20) + "b", "1,048,577 characters"),
        ([{"role": "tool", "content": "4"}], "chat template"),
    ],
)
def test_a_value_that_cannot_be_appended_is_named(appended, message):
    with pytest.raises(LostError, match=message):
        Rendering(tokenizer=ByteTokenizer()).ids(appended, after=NOTHING)


def test_a_character_that_is_not_in_the_alphabet_is_named():
    with pytest.raises(LostError, match="cannot be tokenized: character 'x'"):
        Rendering(tokenizer=CharTokenizer("01")).ids("0x", after=NOTHING)


@pytest.fixture(scope="module")
def chat():
    return HuggingFaceTokenizer(files_of())


def test_a_message_is_rendered_after_the_turn(chat):
    """A turn with its end token gets the template's text after an answer, without that token."""
    rendering = Rendering(tokenizer=chat)
    turn = np.concatenate([chat.encode("2+2?"), [chat.eos_id]]).astype(np.int32)
    whole = chat.chat_template.render([ASKED, {"role": "assistant", "content": "2+2?"}, ANSWER])
    before = chat.chat_template.render([ASKED])
    assert whole.startswith(before)
    appended = rendering.ids([ANSWER], after=turn)
    assert chat.spelled(np.array([*turn, *appended])) == whole[len(before) :]
    cut = rendering.ids([ANSWER], after=turn[:-1])
    assert cut.tolist() == [chat.eos_id, *appended], "a turn that was cut off is ended"


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}</turn>\n{% endfor %}assistant:"
GUESS = "{% for m in messages %}{{ m.content.rstrip('?') ~ '?' if m.role == 'assistant' else m.content }}{% endfor %}"
SPACED = "{% for m in messages %}[{{ m.role }}] {{ m.content }} <|im_end|>{% endfor %}"
HEADED = "{% for m in messages %}{{ '\n<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}{{ '\n<|im_start|>assistant\n' }}"


@pytest.mark.parametrize(
    ("template", "turn", "appended"),
    [
        (CHATML, ["4", 2], "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, ["4"], "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, ["4", 2, "\n"], "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, ["4 <|"], "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"),
        (PLAIN, ["4</turn>"], "\nuser: no</turn>\nassistant:"),
        (PLAIN, ["4</turn>\n"], "user: no</turn>\nassistant:"),
        (PLAIN, ["4</turn>\nuser:"], " no</turn>\nassistant:"),
        (PLAIN, ["4 <", 0], "</turn>\nuser: no</turn>\nassistant:"),
        (GUESS, ["39?"], "no"),
        (GUESS, ["39"], "?no"),
        (SPACED, ["4", 2], "[user] no <|im_end|>"),
        (SPACED, ["4 ", 2], "[user] no <|im_end|>"),
        (HEADED, ["4\n", 1], "user\nno\n<|im_start|>assistant\n"),
        (HEADED, ["4\n"], "<|im_start|>user\nno\n<|im_start|>assistant\n"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["no"], "no"),
    ],
)
def test_text_that_ends_a_turn_is_not_appended_again(template, turn, appended):
    """The turn ends with a special token (2 is <|im_end|>, 1 is <|im_start|>) or with a stop string, which the template writes after an answer."""
    chat = HuggingFaceTokenizer(files_of(template=template, eos_token="<|endoftext|>"))
    found = Rendering(tokenizer=chat).ids([{"role": "user", "content": "no"}], after=ids_of(chat, turn))
    assert chat.spelled(found) == appended


def test_a_stop_string_that_the_shipped_template_puts_back_is_there_once():
    """The model's guesses end with the stop string "?". The template writes it again, because HTTP clients do not get it."""
    shipped = load_tokenizer(Path(dapo_jax.__file__).parent / "assets" / "turns_quickstart")
    reply = [{"role": "user", "content": ">"}]
    assert shipped.decode(Rendering(tokenizer=shipped).ids(reply, after=shipped.encode("39?"))) == ">"


def test_a_message_after_another_end_token_keeps_the_templates_end_token():
    """The model may end a turn with either of two tokens; the template writes <|im_end|> (2) after an answer."""
    tokenizer = HuggingFaceTokenizer(files_of(generation={"eos_token_id": [2, 0]}))
    rendering = Rendering(tokenizer=tokenizer)
    by_its_own, by_another = (rendering.ids([ANSWER], after=np.array([9, end], np.int32)) for end in (2, 0))
    assert by_another.tolist() == [2, *by_its_own]


def test_a_context_given_as_a_text_begins_as_a_prompt_does():
    """With the token that Llama 3 puts before a text (3); a text that is appended has none."""
    files = files_of(with_beginning(byte_level_json()), bos_token="<|begin_of_text|>")
    rendering = Rendering(tokenizer=HuggingFaceTokenizer(files))
    appended = rendering.ids("2+2", after=None).tolist()
    assert 3 not in appended
    assert rendering.context_ids(Context("2+2")).tolist() == [3, *appended]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "4"}, "'role' must be a string"),
        ({"role": "tool"}, "'content' must be a string"),
        ({"role": "tool", "content": ["4"]}, "'content' has the part '4'"),
        ({"role": "tool", "content": "x" * (1 << 21)}, r"2,097,1\d\d characters"),
    ],
)
def test_a_bad_message_is_named(chat, message, error):
    with pytest.raises(LostError, match=error):
        Rendering(tokenizer=chat).ids([message], after=np.array([chat.eos_id], np.int32))


def test_messages_cannot_follow_a_prompt(chat):
    with pytest.raises(LostError, match="messages cannot follow a prompt"):
        Rendering(tokenizer=chat).ids([ANSWER], after=None)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{{ raise_exception('no tools here') if m.role == 'tool' }}", "refuses the messages: no tools here"),
        ("{{ m.content | tojson(ensure_ascii=True) if m.role == 'tool' else m.content }}", "escapes"),
        ("{{ m.content if m.role != 'assistant' }}", "leaves out the assistant's answer"),
        ("", "leaves out message 0"),
    ],
)
def test_a_template_that_cannot_render_a_message_is_named(written, message):
    tokenizer = HuggingFaceTokenizer(files_of(template=f"{{% for m in messages %}}{written}{{% endfor %}}"))
    with pytest.raises(LostError, match=message):
        Rendering(tokenizer=tokenizer).ids([{"role": "tool", "content": "<"}], after=NOTHING)


@pytest.mark.parametrize(
    "tools", ["{% for m in messages %}", "{# tools #}{% for m in messages if not tools or True %}"]
)
def test_tools_are_refused_if_the_template_does_not_show_them(tools):
    """The second template has the word in a comment and in a condition, but no schema is in the text."""
    tokenizer = HuggingFaceTokenizer(files_of(template=f"{tools}{{{{ m.content }}}}{{% endfor %}}"))
    with pytest.raises(LostError, match="`tools`"):
        Rendering(tokenizer=tokenizer).context_ids(Context([ASKED], tools=[{"type": "function"}]))


CALLED = (
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.tool_calls is defined %}{% set f = m.tool_calls[0].function %}{% set last.name = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% elif m.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('a result needs a call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)  # fmt: skip
"""Our own template in the format of gpt-oss."""


@pytest.mark.parametrize("end", ["<|call|>", ""])
def test_a_result_follows_its_call_if_the_template_needs_the_call(end):
    made = Tokenizer.from_str(byte_level_json())
    marks = ("<|start|>", "<|end|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>")
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer = HuggingFaceTokenizer(files_of(made.to_str(), template=CALLED))
    turn = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}" + end
    ids = np.array(made.encode(turn, add_special_tokens=False).ids, np.int32)
    result = {"role": "tool", "name": "add", "content": "4<|end|>"}
    found = Rendering(tokenizer=tokenizer).ids([result], after=ids)
    expected = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4<|end|>"<|end|><|start|>assistant'
    assert tokenizer.spelled(found) == ("" if end else "<|call|>") + expected
    assert (found == made.token_to_id("<|end|>")).sum() == 1, "a result has no special tokens"
    with pytest.raises(LostError, match="a result needs a call"):
        Rendering(tokenizer=tokenizer).ids([ASKED, result], after=ids)


GEMMA4 = (
    "{% set last = namespace(of=none) %}{% for m in messages if m.role != 'tool' %}{% if last.of != 'result' %}<|turn>{{ m.role }}\n{% endif %}{% set last.of = none %}"
    "{% for one in m.tool_calls or [] %}<|tool_call>call:{{ one.function.name }}{{ '{' }}{% for k, v in one.function.arguments.items() %}"
    "{{ k }}:<|\"|>{{ v }}<|\"|>{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>{% set last.of = 'call' %}{% endfor %}"
    "{% if last.of == 'call' %}<|tool_response>{% set first = messages.index(m) + 1 %}{% for r in messages[first:] if r.role == 'tool' %}"
    "{{ '<|tool_response>' if not loop.first }}response:{{ r.name }}{value:<|\"|>{{ r.content }}<|\"|>}<tool_response|>{% set last.of = 'result' %}{% endfor %}{% endif %}"
    "{{ m.content }}{% if last.of is none %}<turn|>\n{% endif %}{% endfor %}{% if last.of is none %}<|turn>model\n{% endif %}"
)  # fmt: skip
"""Our own template in the format of Gemma 4. It writes results after their call, in the same turn, which then continues."""


@pytest.mark.parametrize("end", ["<|tool_response>", ""])
def test_a_result_continues_the_turn_if_the_template_writes_it_after_the_call(end):
    made = Tokenizer.from_str(byte_level_json())
    marks = (
        "<|turn>",
        "<turn|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    )
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer = HuggingFaceTokenizer(files_of(made.to_str(), template=GEMMA4))
    turn = "<|tool_call>call:add{a:1}<tool_call|>" + end
    ids = np.array(made.encode(turn, add_special_tokens=False).ids, np.int32)
    results = [{"role": "tool", "name": name, "content": f"4{end}"} for name in ("add", "sub")]
    found = tokenizer.spelled(Rendering(tokenizer=tokenizer).ids(results, after=ids))
    expected = [
        f'<|tool_response>response:{one["name"]}{{value:<|"|>4{end}<|"|>}}<tool_response|>' for one in results
    ]
    assert found == "".join(expected).removeprefix(end)


CALLS = (
    "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for one in m.tool_calls or [] %}BEGIN{{ one.function.name }}{{ one.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}<assistant><think></think>"
)  # fmt: skip


@pytest.mark.parametrize(
    ("begin", "warns"), [("[TOOL_CALLS]", 0), ("<|call|>", 1), ('<tool_call>{"name": "add"} ', 0)]
)
def test_calls_in_an_unknown_format_are_warned_of(begin, warns):
    """The prompt opens thoughts, which this message does not have. Their mark begins like the mark of a call."""
    tokenizer = HuggingFaceTokenizer(files_of(template=CALLS.replace("BEGIN", begin)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Rendering(tokenizer=tokenizer).context_ids(Context([ASKED], tools=[{"function": {"name": "add"}}]))
    assert len([one for one in found if f"{begin}add" in str(one.message)]) == len(found) == warns
