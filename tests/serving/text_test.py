"""Text that is decoded in blocks equals the text of all tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.serving.text import GrowingText, decoded
from dapo_jax.text.stop_strings import StopStrings
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer
from tests.text.stop_strings_test import MERGED, SPACED, SPECIAL_STOPS, ids_of


def grown(tokenizer, pieces, stop=(), after=None):
    text = GrowingText(tokenizer, stop, after=after)
    return [*(text.add(piece) for piece in pieces), text.add([], last=True)]


def test_half_a_character_is_held_back():
    """é has two bytes, € three; the response ends inside the second character."""
    ids = ByteTokenizer().encode("aé€").tolist()
    assert grown(ByteTokenizer(), [[token] for token in ids[:-1]]) == ["a", "", "é", "", "", "\ufffd"]
    assert grown(ByteTokenizer(), [ids[:2], ids[2:]]) == ["a", "é€", ""]


def test_a_token_may_be_decoded_differently_at_the_start_of_a_text():
    """Some tokenizers drop the first space of a text."""

    class Spaced(CharTokenizer):
        def decode(self, ids, after=None):
            return super().decode(ids).removeprefix(" ")

    ids = Spaced("ab ").encode(" a b").tolist()
    assert grown(Spaced("ab "), [[token] for token in ids]) == ["", "a", " ", "b", ""]


@given(data=st.binary(max_size=12), size=st.integers(1, 4))
def test_pieces_of_any_bytes_add_up_to_the_whole(data, size):
    ids = [byte + 2 for byte in data]
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert "".join(grown(ByteTokenizer(), pieces)) == ByteTokenizer().decode(np.array(ids, np.int32))


@given(text=st.text("a END\n日本é🜂"), size=st.integers(1, 4))
def test_a_text_after_other_text_keeps_its_first_space(text, size):
    after = SPACED.encode("a:")
    ids = SPACED.encode(text, after).tolist()
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert "".join(grown(SPACED, pieces, after=after)) == text


@pytest.mark.parametrize(
    ("text", "shown"), [(" END", " END"), (" END END", " END"), ("a END", "a"), (" a END", " a")]
)
@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_first_space_does_not_complete_a_stop_string(text, shown, size):
    """The sampler decodes responses without their prompt, so it does not see this space and samples on."""
    after = SPACED.encode("a:")
    ids = SPACED.encode(text, after)
    stop = StopStrings(SPACED, [" END"])
    assert (stop.find(ids, 0) is None) == (shown == text)
    assert stop.decode(ids, after) == shown
    pieces = [ids[start : start + size].tolist() for start in range(0, len(ids), size)]
    assert "".join(grown(SPACED, pieces, [" END"], after=after)) == shown


@given(text=st.text("a END\n日本é🜂"), size=st.integers(1, 4))
def test_pieces_of_text_in_single_bytes_add_up_to_the_text(text, size):
    """With byte fallback, the library decodes a run of byte tokens to replacement characters alone until its last character is complete."""
    ids = SPACED.encode(text).tolist()
    pieces = grown(SPACED, [ids[start : start + size] for start in range(0, len(ids), size)])
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_long_run_of_single_bytes_is_shown_character_by_character():
    text, parts = GrowingText(SPACED), []
    for token in SPACED.encode("日本" * 100).tolist():
        parts.append(text.add([token]))
        assert len(text._window) < 10
    assert [part for part in parts if part] == [*"日本"] * 100


def test_a_token_without_text_does_not_hide_the_space_after_it():
    ids = [*SPACED.encode("a").tolist(), 1, *SPACED.encode(" b", np.zeros(0, np.int32)).tolist()]
    assert "".join(grown(SPACED, [[token] for token in ids])) == "a b"


@pytest.mark.parametrize("size", [1, 3])
def test_tokens_that_are_no_characters_are_not_decoded_again_and_again(size):
    """0x80 is no beginning of a character, E2 82 AC is one of three bytes, and EF BF BD is the replacement character itself."""
    euro = "\N{EURO SIGN}".encode()
    data = b"\x80" * 50 + b"a" + euro * 20 + "\ufffd".encode() * 50 + euro[:2] * 30 + euro
    ids = [byte + 2 for byte in data]
    text, parts, longest = GrowingText(ByteTokenizer()), [], 0
    for start in range(0, len(ids), size):
        parts.append(text.add(ids[start : start + size]))
        longest = max(longest, len(text._window))
    assert "".join([*parts, text.add([], last=True)]) == data.decode("utf-8", "replace")
    assert longest < 30


@pytest.mark.parametrize(("strings", "parts", "text"), SPECIAL_STOPS)
@pytest.mark.parametrize("size", [1, 2, 50])
def test_the_text_ends_before_a_stop_string_with_a_special_token(strings, parts, text, size):
    ids = ids_of(MERGED, parts).tolist()
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert "".join(grown(MERGED, pieces, strings)) == text


@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_text_ends_before_a_stop_id(size):
    """The tokens are bytes, and a stop string comes first in the second response."""
    ids = ByteTokenizer().encode("ab.cd").tolist()
    for stop, text in ((), "ab."), (("b.",), "a"):
        growing = GrowingText(ByteTokenizer(), stop, ids[3:4])
        blocks = [ids[at : at + size] for at in range(0, len(ids), size)]
        shown = [growing.add(block, last=block is blocks[-1]) for block in blocks]
        assert "".join(shown) == text


def test_ids_outside_the_tokenizers_vocabulary_are_left_out():
    """Many models have a larger vocabulary than their tokenizer."""
    assert decoded(CharTokenizer("ab"), [2, 99, 3, -1]) == "ab"
