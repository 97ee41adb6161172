"""The tokenizer of a GGUF file as files of a folder: the model's own splits and special tokens."""

import json

import pytest
from tokenizers import Tokenizer

from dapo_jax.models.gguf import GgufFile
from dapo_jax.models.gguf_tokenizer import tokenizer_files
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.text.huggingface import HuggingFaceTokenizer

pytest.importorskip("gguf")

from tests.models.gguf_files import GEMMA, GEMMA_TOKENS, TEMPLATE, TOKENS, write_gguf

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # "ab" has a higher score than "bc" and "▁a". "ab" and "c" are then "abc", and " " and "ab" are "▁ab". "abc" has the higher score.
        ("abc", ["abc"]),
        (" abc", ["▁", "abc"]),
        (" ab", ["▁ab"]),
        (" acb", ["▁a", "c", "b"]),
        ("bcab", ["bc", "ab"]),
        # User-defined tokens are found first, the longest at each place.
        ("a  ab", ["a", "▁▁", "ab"]),
        ("a   ab", ["a", "▁▁▁", "ab"]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"]),
        ("a<b>b", ["a", "<b>", "b"]),
        # Characters outside the vocabulary are their bytes in UTF-8.
        ("é", ["<0xC3>", "<0xA9>"]),
        ("ab<end_of_turn>", ["ab", "<end_of_turn>"]),
    ],
)  # fmt: skip
def test_a_gemma_file_joins_the_neighbours_of_the_highest_score(text, expected, files):
    made = files(extra=GEMMA)
    assert tokens_of(made, text) == expected
    tokenizer = Tokenizer.from_str(made["tokenizer.json"])
    assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("<end_of_turn>", "")
    ids = {token.replace(" ", "▁"): i for i, token in enumerate(GEMMA_TOKENS)}
    assert tokenizer.encode(text, add_special_tokens=False).ids == [ids[token] for token in expected]


def test_a_gemma_prompt_begins_once_and_ends_with_a_turn_or_a_text(files, tmp_path):
    made = files(extra=GEMMA)
    for name, content in made.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    tokenizer = HuggingFaceTokenizer.load(tmp_path)
    for text in ("ab", "<bos>ab"):
        assert tokenizer.encode_prompt(text).tolist() == [2, list(GEMMA_TOKENS).index("ab")]
    assert tokenizer.stop_ids == (1, 4)
    assert json.loads(made["generation_config.json"]) == {
        "bos_token_id": 2, "eos_token_id": [1, 4], "pad_token_id": 0
    }  # fmt: skip
    turned = files(extra=GEMMA | {"tokenizer.ggml.eos_token_id": 4})
    assert json.loads(turned["generation_config.json"])["eos_token_id"] == [4, 1]


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("qwen2", False), ("smollm", False)])
def test_without_the_key_the_kind_of_the_tokenizer_decides_whether_a_text_begins_with_a_token(
    pre, adds, files
):
    """The defaults of `add_bos` in llama.cpp's src/llama-vocab.cpp."""
    made = files(pre=pre)
    assert tokens_of(made, "a", special=True) == [*["<|im_start|>"] * adds, "a"]
    assert json.loads(made["tokenizer_config.json"])["add_bos_token"] == adds


@pytest.mark.parametrize(
    "end", ["<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<EOT>", "<end_of_turn>", "<eos>"]
)
def test_a_spelled_end_token_ends_a_response_whatever_its_type(end, files):
    """llama.cpp finds these tokens by their text and makes them control tokens. `<think>` at 267 has another type, so it is not special."""
    made = files(extra={"tokenizer.ggml.tokens": [*TOKENS[:-1], end]})
    assert json.loads(made["generation_config.json"])["eos_token_id"] == [2, 0, len(TOKENS) - 1]
    tokenizer = Tokenizer.from_str(made["tokenizer.json"])
    assert tokenizer.decode(tokenizer.encode(f"hi{end}").ids) == "hi"


def test_the_id_that_ends_a_message_ends_a_response(files):
    made = files(extra={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 4})
    assert json.loads(made["generation_config.json"])["eos_token_id"] == [2, 5, 4, 0]


def test_a_template_for_tools_is_kept_under_its_name(files):
    made = files(extra={"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_templates": ["tool_use"]})
    config = json.loads(made["tokenizer_config.json"])
    assert config["chat_template"] == {"default": TEMPLATE, "tool_use": "T"}


def test_configuration_files_agree_with_the_metadata(files):
    made = files(extra={"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eot_token_id": 0})
    config = json.loads(made["tokenizer_config.json"])
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["pad_token"] == config["unk_token"] == "<|endoftext|>"
    assert config["model_max_length"] == CONFIG.max_positions
    generation = json.loads(made["generation_config.json"])
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
