"""Stop strings are found at the token that completes them, for any blocks of tokens, from the end of the response alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.stop_strings import StopStrings, stop_ids
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer
from tests.text.folders import byte_fallback_json, files_of

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

    def decode(self, ids):
        self.lengths.append(len(ids))
        return super().decode(ids)


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
