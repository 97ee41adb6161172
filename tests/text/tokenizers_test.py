"""Tokenizers: round trips, what is refused, and the file they are kept in."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.text.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
)
from tests.text.folders import write

SUMS = CharTokenizer("0123456789+=")


@given(st.text())
def test_bytes_round_trip_any_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text


@given(st.text(alphabet=SUMS.alphabet))
def test_characters_round_trip_text_of_the_alphabet(text):
    assert SUMS.decode(SUMS.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SUMS])
def test_ordinary_text_never_becomes_a_special_token_and_fits_the_vocabulary(tokenizer):
    ids = tokenizer.encode("0123456789+=")
    assert tokenizer.pad_id != tokenizer.eos_id
    assert not {tokenizer.pad_id, tokenizer.eos_id} & set(ids.tolist())
    assert ids.max() < tokenizer.vocab_size
    assert isinstance(tokenizer, Tokenizer)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SUMS])
def test_decoding_leaves_special_tokens_out(tokenizer):
    ids = np.concatenate([[tokenizer.pad_id], tokenizer.encode("1+2"), [tokenizer.eos_id, tokenizer.pad_id]])
    assert tokenizer.decode(ids) == "1+2"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SUMS])
def test_empty_text_is_no_tokens(tokenizer):
    ids = tokenizer.encode("")
    assert ids.shape == (0,)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == ""


def test_vocabulary_is_the_specials_and_the_rest():
    assert ByteTokenizer().vocab_size == 2 + 256
    assert SUMS.vocab_size == 2 + 12


def test_bytes_that_are_no_utf8_become_the_replacement_character():
    """0xC3 opens a two-byte character that "A" (0x41) does not close; ids are bytes + 2."""
    assert ByteTokenizer().decode(np.array([0xC3 + 2, 0x41 + 2], np.int32)) == "\ufffdA"


def test_unknown_character_is_named_with_its_position_and_the_alphabet():
    with pytest.raises(
        ValueError, match=r"character 'x' at position 2 of '1\+x' .* alphabet '0123456789\+='"
    ):
        SUMS.encode("1+x")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SUMS])
@pytest.mark.parametrize("bad", [-1, 300])
def test_id_outside_the_vocabulary_is_refused(tokenizer, bad):
    with pytest.raises(ValueError, match=f"token {bad} is outside .* vocabulary of {tokenizer.vocab_size}"):
        tokenizer.decode(np.array([2, bad], np.int32))


def test_alphabet_that_repeats_a_character_is_refused():
    with pytest.raises(ValueError, match=r"repeats \['b'\]"):
        CharTokenizer("abcb")


def test_empty_alphabet_is_refused():
    with pytest.raises(ValueError, match="empty"):
        CharTokenizer("")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SUMS, CharTokenizer('é"\\\n中')])
def test_saved_tokenizer_comes_back_equal(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "model")
    assert load_tokenizer(tmp_path / "model") == tokenizer


def test_file_says_its_type_in_plain_json(tmp_path):
    save_tokenizer(SUMS, tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    assert content == {"type": "dapo_jax.char", "alphabet": "0123456789+="}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"type": "dapo_jax.word"}', "type 'dapo_jax.word'; known are 'dapo_jax.byte'"),
        ('{"model": {}}', "is no file of the library tokenizers"),
        ('{"model": 1}', "type None"),
        ("[1]", "holds a list; it must be an object with named values"),
        ("{", "not a JSON file"),
        ('{"type": "dapo_jax.char"}', "'alphabet' must be a string; got None"),
    ],
)
def test_file_that_is_no_tokenizer_is_refused(content, message, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SUMS])
def test_the_end_token_is_the_only_one_that_ends_a_response_and_nothing_begins_a_text(tokenizer):
    assert tokenizer.stop_ids == (tokenizer.eos_id,)
    assert tokenizer.chat_template is None
    np.testing.assert_array_equal(tokenizer.encode_prompt("1+2"), tokenizer.encode("1+2"))


@pytest.mark.parametrize("kind", ["dapo_jax.byte", "dapo_jax.char"])
def test_a_folder_s_chat_template_is_read_and_written_back(kind, tmp_path):
    write(tmp_path / "a", {"tokenizer.json": json.dumps({"type": kind, "alphabet": "1+2"}).encode()})
    assert load_tokenizer(tmp_path / "a").chat_template is None
    write(tmp_path / "a", {"chat_template.jinja": b"{{ messages[0].content }}+\r\n"})
    tokenizer = load_tokenizer(tmp_path / "a")
    save_tokenizer(tokenizer, tmp_path / "b")
    for folder in ("a", "b"):
        assert (
            load_tokenizer(tmp_path / folder).chat_template.render([{"role": "user", "content": "1"}]) == "1+"
        )
    assert (tmp_path / "b" / "chat_template.jinja").read_bytes() == (
        tmp_path / "a" / "chat_template.jinja"
    ).read_bytes()
    write(tmp_path / "a", {"chat_template.jinja": b"\xff"})
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        load_tokenizer(tmp_path / "a")


def test_a_model_may_have_more_rows_than_the_tokenizer_ids_but_not_fewer():
    check_vocabulary(SUMS, 14)
    check_vocabulary(SUMS, 64)
    with pytest.raises(ValueError, match=r"tokenizer has 14 ids .* 13 rows: ids from 13 on"):
        check_vocabulary(SUMS, 13)


def test_a_tokenizer_of_another_kind_cannot_be_saved(tmp_path):
    class Own:
        vocab_size = pad_id = eos_id = 1
        stop_ids, chat_template = (1,), None

        def encode(self, text): ...

        encode_prompt = encode_plain = guarded = encode_guarded = decode = encode

    with pytest.raises(ValueError, match="a Own cannot be written"):
        save_tokenizer(Own(), tmp_path)


def test_a_folder_with_a_sentencepiece_file_says_how_to_convert_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"It has tokenizer\.model, which is not read here; .*save_pretrained"
    ):
        load_tokenizer(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read a tokenizer from .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_bytes_of_tokens_are_those_of_the_characters():
    chars = CharTokenizer("1+é")
    assert [chars.token_bytes(token) for token in range(-1, 6)] == [
        None,
        b"",
        b"",
        b"1",
        b"+",
        "é".encode(),
        None,
    ]
    assert [ByteTokenizer().token_bytes(token) for token in (-1, 1, 2, 257, 258)] == [
        None,
        b"",
        b"\0",
        b"\xff",
        None,
    ]
