"""The tokenizers without training: round trips, errors and their files."""

import json

import numpy as np
import pytest
import tokenizers
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


def test_bytes_that_are_no_utf8_become_the_replacement_character():
    """0xC3 opens a two-byte character that "A" (0x41) does not close; ids are bytes + 2."""
    assert ByteTokenizer().decode(np.array([0xC3 + 2, 0x41 + 2], np.int32)) == "\ufffdA"


def test_unknown_character_is_named_with_its_position_and_the_alphabet(tmp_path):
    for method in (SUMS.encode, SUMS.encode_plain, SUMS.encode_prompt):
        with pytest.raises(ValueError, match=r"'x' at position 2 of '1\+x' .*char:0123456789\+="):
            method("1+x")
    save_tokenizer(SUMS, tmp_path)
    with pytest.raises(ValueError, match=rf"'x' at position 2 of '1\+x' .*{tmp_path}"):
        load_tokenizer(tmp_path).encode("1+x")


ALPHABETS = ["0123456789+=:,?", "0123456789-:?<>", 'é"\\\n 中']


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_the_ids_of_characters_follow_the_padding_and_the_end_token(alphabet, tmp_path):
    """Id 2 + place in the alphabet, also after saving. No special token can be spelled."""
    save_tokenizer(CharTokenizer(alphabet), tmp_path)
    for tokenizer in (CharTokenizer(alphabet), load_tokenizer(tmp_path)):
        assert tokenizer.encode(alphabet).tolist() == list(range(2, 2 + len(alphabet)))
        assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.stop_ids) == (0, 1, (1,))
        assert tokenizer.vocab_size == 2 + len(alphabet)
        assert tokenizer.decode(np.arange(2 + len(alphabet))) == alphabet
        assert (
            tokenizer.encode_guarded(tokenizer.guarded(alphabet)).tolist()
            == tokenizer.encode(alphabet).tolist()
        )


def test_characters_of_the_special_tokens_stay_characters():
    tokenizer = CharTokenizer("[]PADEN")
    for encode in (
        tokenizer.encode,
        tokenizer.encode_plain,
        lambda text: tokenizer.encode_guarded(tokenizer.guarded(text)),
    ):
        assert encode("[PAD]").tolist() == [2, 4, 5, 6, 3]


def test_transformers_would_find_an_ordinary_file(tmp_path):
    """transformers reads a fast tokenizer from these two files: the class, and the tokens that end and pad."""
    for tokenizer, ids in (
        (CharTokenizer("1+"), [2, 3, 2]),
        (ByteTokenizer(), [0x31 + 2, 0x2B + 2, 0x31 + 2]),
    ):
        save_tokenizer(tokenizer, tmp_path)
        library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert library.encode(f"1+1{config['eos_token']}").ids == [*ids, 1]
        assert library.decode([*ids, 1, 0]) == "1+1"
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert [library.token_to_id(config[name]) for name in ("pad_token", "eos_token")] == [0, 1]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SUMS, CharTokenizer('é"\\\n中')])
def test_saved_tokenizer_comes_back_equal(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "model")
    assert load_tokenizer(tmp_path / "model") == tokenizer


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_a_former_tokenizer_is_refused_and_the_call_in_the_message_converts_it(kind, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"type": f"dapo_jax.{kind}", "alphabet": "1+2"}))
    with pytest.raises(
        ValueError, match=rf"tokenizer\.json has the tokenizer type 'dapo_jax\.{kind}'"
    ) as refused:
        load_tokenizer(tmp_path)
    call = str(refused.value).partition("call ")[2]
    eval(call, {**globals(), "FOLDER": tmp_path})
    assert load_tokenizer(tmp_path) == (ByteTokenizer() if kind == "byte" else CharTokenizer("1+2"))


def test_a_folder_s_chat_template_is_read_and_written_back(tmp_path):
    template = b"{{ messages[0].content }}+\r\n"
    save_tokenizer(SUMS, tmp_path / "a")
    assert load_tokenizer(tmp_path / "a").chat_template is None
    write(tmp_path / "a", {"chat_template.jinja": template})
    save_tokenizer(load_tokenizer(tmp_path / "a"), tmp_path / "b")
    for folder in ("a", "b"):
        rendered = load_tokenizer(tmp_path / folder).chat_template.render([{"role": "user", "content": "1"}])
        assert rendered == "1+"
        assert (tmp_path / folder / "chat_template.jinja").read_bytes() == template
    write(tmp_path / "a", {"chat_template.jinja": b"\xff"})
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        load_tokenizer(tmp_path / "a")


def test_a_model_may_have_more_rows_than_the_tokenizer_ids_but_not_fewer():
    check_vocabulary(SUMS, 14)
    check_vocabulary(SUMS, 64)
    with pytest.raises(ValueError, match=r"tokenizer has 14 ids .* 13 rows: ids from 13 on"):
        check_vocabulary(SUMS, 13)


def test_the_ids_of_bytes_follow_the_padding_and_the_end_token(tmp_path):
    """Id 2 + byte, also after saving. U+10FFFF is F4 8F BF BF in UTF-8."""
    save_tokenizer(ByteTokenizer(), tmp_path)
    for tokenizer in (ByteTokenizer(), load_tokenizer(tmp_path)):
        for text in ("\0 \x7f\n<|PAD|>", "é中🙂\U0010ffff"):
            assert tokenizer.encode(text).tolist() == [2 + byte for byte in text.encode()]
        assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.stop_ids) == (258, 0, (1,))


def test_bytes_of_tokens_are_those_of_the_characters():
    chars = CharTokenizer("1+é")
    found = [chars.token_bytes(token) for token in range(-1, 6)]
    assert found == [None, b"", b"", b"1", b"+", "é".encode(), None]
    found = [ByteTokenizer().token_bytes(token) for token in (-1, 1, 2, 257, 258)]
    assert found == [None, b"", b"\0", b"\xff", None]
