"""Stop strings are found at the token that completes them, for any blocks of tokens, from the end of the response alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.stop_strings import StopStrings, stop_ids, turn_end
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer
from tests.text.folders import CHATML, SPECIALS, byte_fallback_json, byte_level_json, files_of

BYTES = ByteTokenizer()
MERGED = HuggingFaceTokenizer(files_of())
SPACED = HuggingFaceTokenizer(files_of(byte_fallback_json(), eos_token="</s>", pad_token=None))
STRINGS = ["END", " 終わり", "🜂", "\n\n", "e"]


def by_definition(tokenizer, strings, ids):
    """The first n for which the text of the first n tokens holds a string."""
    holds = (n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in strings))
    return next(holds, None)


def in_blocks(stop, ids, sizes):
    """Calls `find` for blocks of tokens of the given sizes and then for the rest."""
    start = 0
    for size in [*sizes, len(ids)]:
        end = min(start + size, len(ids))
        if (found := stop.find(ids[:end], start)) is not None:
            return found
        start = end
    return None


pieces = st.lists(
    st.sampled_from([*STRINGS, "E", "N", "D", " ", "終", "わ", "日本", "🜁", "x", "\n"]), max_size=12
)
strings_asked = st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3)
sizes = st.lists(st.integers(0, 5), max_size=20)


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED, SPACED])
@given(pieces=pieces, strings=strings_asked, sizes=sizes)
def test_a_string_is_found_at_the_token_that_completes_it_for_any_blocks(tokenizer, pieces, strings, sizes):  # fmt: skip
    ids = tokenizer.encode("".join(pieces))
    expected = by_definition(tokenizer, strings, ids)
    stop = StopStrings(tokenizer, strings)
    assert stop.find(ids, 0) == expected
    assert in_blocks(stop, ids, sizes) == expected


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED])
@given(data=st.data(), strings=strings_asked, sizes=sizes)
def test_any_ids_a_model_may_sample_are_searched_by_definition(tokenizer, data, strings, sizes):
    vocabulary = tokenizer.vocab_size - 1 if tokenizer is BYTES else 400  # beyond the 320 of the tokenizer
    parts = st.one_of(st.lists(st.integers(0, vocabulary)), pieces.map(lambda p: tokenizer.encode("".join(p)).tolist()))  # fmt: skip
    ids = np.array([token for part in data.draw(st.lists(parts, max_size=4)) for token in part], np.int32)
    stop = StopStrings(tokenizer, strings)
    assert in_blocks(stop, ids, sizes) == stop.find(ids, 0) == by_definition(tokenizer, strings, ids)


@given(ids=st.lists(st.integers(0, SPACED.vocab_size - 1)), strings=strings_asked, sizes=sizes)
def test_blocks_do_not_matter_for_a_decoder_that_drops_broken_bytes(ids, strings, sizes):
    ids = np.array(ids, np.int32)
    stop = StopStrings(SPACED, strings)
    assert in_blocks(stop, ids, sizes) == stop.find(ids, 0)


def test_special_tokens_inside_a_string_do_not_hide_it():
    """Graders see the text without special tokens, which holds the string."""
    special = MERGED.stop_ids[0]
    ids = np.array([*MERGED.encode("E"), *[special] * 50, *MERGED.encode("N"), special, *MERGED.encode("D")])
    stop = StopStrings(MERGED, ["END"])
    assert stop.find(ids, len(ids) - 1) == len(ids)
    assert stop.find(ids[:-1], 0) is None


END, START = 2, 1
"""Ids of <|im_end|> and <|im_start|>."""
SPECIAL_STOPS = [
    (["<|im_end|>"], ["4", END], "4"),
    (["<|im_end|>\n"], ["4", END, "\n"], "4"),
    (["x<|im_end|>"], ["4", END, "x", END], "4"),
    (["\n<|im_start|>user"], ["4", "\n", START, "us", "er"], "4"),
    (["<|im_end|><|im_start|>"], ["4", END, "y", END, START], "4y"),
    (["<|im_end|>", "46"], ["4", END], "4"),
    (["<|im_end|>", "46"], ["a46"], "a"),
    (["<|im_end|>"], ["é", END], "é"),
    (["<|im_end|>"], [END], ""),
    (["<|im_end|>"], ["4<|im_end", "|>"], "4"),  # spelled with ordinary tokens
]


def ids_of(tokenizer, parts):
    """Tokens of texts, which may not contain special tokens, and special ids between them."""
    encoded = [
        [part] if isinstance(part, int) else tokenizer.encode_plain(part, NOTHING).tolist() for part in parts
    ]
    return np.array([token for each in encoded for token in each], np.int32)


NOTHING = np.zeros(0, np.int32)


@pytest.mark.parametrize(("strings", "parts", "text"), SPECIAL_STOPS)
def test_a_string_with_a_special_token_is_found_among_the_ids(strings, parts, text):
    ids = ids_of(MERGED, parts)
    stop = StopStrings(MERGED, strings)
    for sizes in ([], [1] * len(ids), [2] * len(ids)):
        assert in_blocks(stop, np.append(ids, MERGED.encode(" and more")), sizes) == len(ids)
    assert stop.find(ids[:-1], 0) is None
    assert stop.decode(ids) == text


def test_a_special_token_outside_the_strings_does_not_stop_and_has_no_text():
    stop = StopStrings(MERGED, ["<|im_end|>x"])
    ids = ids_of(MERGED, ["4", START, "5", END, "y", END])
    assert stop.find(ids, 0) is None
    assert stop.decode(ids) == "45y"


def test_the_text_is_cut_before_the_string_and_otherwise_whole():
    stop = StopStrings(MERGED, ["Question:", "\n\n"])
    assert stop.decode(MERGED.encode(" 46\n\nQuestion: what")) == " 46"
    assert stop.decode(MERGED.encode(" 46\n")) == " 46\n"
    assert StopStrings(MERGED, []).decode(MERGED.encode("END")) == "END"


def test_without_strings_nothing_is_found_and_nothing_decoded():
    assert StopStrings(Counting(), []).find(BYTES.encode("END"), 0) is None


class Counting(ByteTokenizer):
    """Records the number of tokens of each call of `decode`."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def decode(self, ids, after=None):
        self.lengths.append(len(ids))
        return super().decode(ids, after)


@pytest.mark.parametrize("text", ["plain text. ", "日本語"])
def test_only_the_end_of_a_long_response_is_decoded(text):
    """4 bytes of "STOP" + 4 in a window, 4 more for the alignments, and the 16 tokens of a block."""
    tokenizer = Counting()
    stop = StopStrings(tokenizer, ["STOP"])
    ids = BYTES.encode(text * 400)
    for end in range(16, len(ids), 16):
        assert stop.find(ids[:end], end - 16) is None
    assert max(tokenizer.lengths) <= 4 + 4 + 4 + 16


@pytest.mark.parametrize(("string", "words"), [("", "is empty"), ("a\ufffd", "contains U\\+FFFD")])
def test_strings_that_cannot_be_searched_are_refused(string, words):
    with pytest.raises(ValueError, match=words):
        StopStrings(BYTES, ["x", string])


def test_extra_ids_end_a_response_after_the_tokenizer_s_own():
    assert stop_ids(BYTES, [67, 1, 66]) == (1, 67, 66)
    assert stop_ids(CharTokenizer("ab"), []) == (1,)


@pytest.mark.parametrize("token", [-1, 4])
def test_an_extra_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=f"stop_token_ids: {token} .* 0 to 3"):
        stop_ids(CharTokenizer("ab"), [2, token])


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}END{% endfor %}<|im_start|>assistant\n"
ROLES = "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|begin_of_text|>' }}{{ m.content }}{% endfor %}<|begin_of_text|>"
"""Without end tokens: the token of the next role follows an answer, as in GLM 4. The user's token is id 1, and the assistant's is id 3."""


@pytest.mark.parametrize(
    ("template", "eos", "generation", "turn", "response"),
    [
        # Qwen's base models and Gemma 3: the files name one end token, and the template writes another.
        (CHATML, "<|endoftext|>", None, 2, (0, 2)),
        (TURN.replace("END", "<|im_end|>\n"), "<|endoftext|>", {"eos_token_id": [0, 3]}, 2, (0, 3, 2)),
        # Llama 2 writes a space before the token.
        (TURN.replace("END", " <|im_end|><|begin_of_text|>"), "<|endoftext|>", None, 2, (0, 2)),
        (TURN.replace("END", "{{ eos_token }}"), "<|endoftext|>", None, 0, (0,)),
        (CHATML, "<|im_end|>", None, 2, (2,)),
        # The token of the user's role ends an answer only if the files say so.
        (ROLES, "<|endoftext|>", {"eos_token_id": [0, 1]}, 1, (0, 1)),
        (ROLES, "<|endoftext|>", None, 0, (0,)),
        (TURN.replace("END", "\n"), "<|endoftext|>", None, 0, (0,)),
        # Templates without such a token, and templates that cannot be rendered.
        (TURN.replace("END", "END"), "<|endoftext|>", None, 0, (0,)),
        ("{{ messages[0].content }}<|im_end|>", "<|endoftext|>", None, 0, (0,)),
        ("{{ raise_exception('no') }}", "<|endoftext|>", None, 0, (0,)),
        ("{% if", "<|endoftext|>", None, 0, (0,)),
        ("{{ strftime_now('%Y') }}" + CHATML, "<|endoftext|>", None, 2, (0, 2)),
        (None, "<|endoftext|>", None, 0, (0,)),
    ],
)  # fmt: skip
def test_the_token_that_a_template_writes_after_an_answer_ends_a_turn(
    template, eos, generation, turn, response
):
    tokenizer = HuggingFaceTokenizer(files_of(template=template, generation=generation, eos_token=eos))
    assert (tokenizer.eos_id, turn_end(tokenizer)) == (0 if eos == SPECIALS[0] else 2, turn)
    assert stop_ids(tokenizer) == response
    assert stop_ids(tokenizer, [300]) == (*response, 300)


HARMONY = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"


def test_the_end_of_a_thought_does_not_end_a_turn():
    """gpt-oss writes `<|end|>` after thoughts and after an earlier answer, and generates `<|return|>` after an answer."""
    tokens = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    made = Tokenizer.from_str(byte_level_json())
    made.add_special_tokens(tokens)
    tokenizer = HuggingFaceTokenizer(files_of(made.to_str(), template=HARMONY, eos_token="<|return|>"))
    assert stop_ids(tokenizer) == (324,)


def test_a_tokenizer_without_special_tokens_in_texts_has_one_end_token():
    template = HuggingFaceTokenizer(files_of(byte_level_json())).chat_template
    for files in (ByteTokenizer().files, CharTokenizer("ab").files):
        tokenizer = HuggingFaceTokenizer({**files, "chat_template.jinja": template.source.encode()})
        assert (turn_end(tokenizer), stop_ids(tokenizer)) == (1, (1,))
