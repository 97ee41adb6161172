"""The tokenizer of a GGUF file as files of a folder: the model's own splits and special tokens."""

import json

import pytest
from tokenizers import Tokenizer

from dapo_jax.models.gguf import GgufFile
from dapo_jax.models.gguf_tokenizer import tokenizer_files
from dapo_jax.testing import tiny_decoder_config, tiny_params

pytest.importorskip("gguf")

from tests.models.gguf_files import TEMPLATE, TOKENS, write_gguf

CONFIG = tiny_decoder_config(vocab_size=len(TOKENS), layers=1)


@pytest.fixture
def files(tmp_path):
    """The files of a GGUF file written with changes."""

    def make(**how):
        path = write_gguf(tmp_path / "model.gguf", CONFIG, tiny_params(CONFIG), **how)
        return tokenizer_files(GgufFile(path).metadata, path)

    return make


def tokens_of(files, text, *, special=False):
    return Tokenizer.from_str(files["tokenizer.json"]).encode(text, add_special_tokens=special).tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # The vocabulary has the merges 1 2 -> 12 and 12 3 -> 123. SmolLM and Qwen split every digit, Llama 3
        # groups of up to three.
        ("smollm", ["x", "1", "2", "3", "1", "2"]),
        ("qwen2", ["x", "1", "2", "3", "1", "2"]),
        ("llama-bpe", ["x", "123", "12"]),
    ],
)
def test_numbers_are_split_as_in_the_model(pre, expected, files):
    assert tokens_of(files(pre=pre), "x12312") == expected


def test_words_take_the_space_before_them(files):
    for pre in ("smollm", "qwen2", "llama-bpe"):
        assert tokens_of(files(pre=pre), "the the") == ["t", "he", "Ġthe"]


@pytest.mark.parametrize(("pre", "expected"), [("smollm", ["a", "'", "S"]), ("qwen2", ["a", "'S"])])
def test_later_expressions_split_contractions_in_capitals_too(pre, expected, files):
    """GPT-2's expression, also SmolLM's, has 's in small letters only: 'S is split after the apostrophe."""
    assert tokens_of(files(pre=pre), "a'S") == expected


@pytest.mark.parametrize(("pre", "same"), [("smollm", False), ("qwen2", True), ("llama-bpe", False)])
def test_only_qwen2_joins_a_letter_and_its_accent(pre, same, files):
    made = files(pre=pre)
    assert (tokens_of(made, "e\N{COMBINING ACUTE ACCENT}") == tokens_of(made, "é")) == same


def test_every_text_comes_back(files):
    for pre in ("smollm", "qwen2", "llama-bpe"):
        tokenizer = Tokenizer.from_str(files(pre=pre)["tokenizer.json"])
        text = "  def f(x):\n\treturn 12 ** 3  # naïve 日本 🙂\r\n"
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_control_tokens_are_special_and_user_defined_ones_are_text(files):
    tokenizer = Tokenizer.from_str(files()["tokenizer.json"])
    ids = tokenizer.encode("<|im_start|>hi<think><|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.id_to_token(ids[-2]) == "<think>"
    assert tokenizer.decode(ids) == "hi<think>"


@pytest.mark.parametrize("adds", [False, True])
def test_the_token_that_begins_a_text_is_added_if_the_file_has_it(adds, files):
    made = files(extra={"tokenizer.ggml.add_bos_token": adds}, pre="llama-bpe")
    assert tokens_of(made, "a", special=True) == [*["<|im_start|>"] * adds, "a"]
    assert json.loads(made["tokenizer_config.json"])["add_bos_token"] == adds


def test_configuration_files_agree_with_the_metadata(files):
    made = files(extra={"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eot_token_id": 0})
    config = json.loads(made["tokenizer_config.json"])
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["pad_token"] == config["unk_token"] == "<|endoftext|>"
    assert config["model_max_length"] == CONFIG.max_positions
    generation = json.loads(made["generation_config.json"])
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"pre": "deepseek-llm"}, r"model\.gguf: tokenizer\.ggml\.pre 'deepseek-llm'.* 'smollm', 'llama-bpe'"),
        ({"extra": {"tokenizer.ggml.model": "llama"}}, r"tokenizer\.ggml\.model 'llama'.* 'gpt2'"),
        ({"extra": {"tokenizer.ggml.eos_token_id": 900}}, r"special tokens {'eos': 900} are outside the vocabulary of 268"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_covered_is_refused_by_name(how, message, files):
    with pytest.raises(ValueError, match=message):
        files(**how)
