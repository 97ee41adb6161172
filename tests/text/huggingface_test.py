"""Tokenizers of real models: special tokens, the beginning and end of a text, and their files."""

import json
import re
import warnings
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Library

from dapo_jax.text.huggingface import ByteTokenizer, HuggingFaceTokenizer
from dapo_jax.text.stop_strings import stop_ids
from dapo_jax.text.tokenizers import (
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
)
from tests.text import folders
from tests.text.folders import byte_fallback_json, byte_level_json, files_of, with_beginning, write

END_OF_TEXT, IM_START, IM_END, BEGIN = range(4)
PLAIN = HuggingFaceTokenizer(files_of())


def made(*args, model=None, **how):
    return HuggingFaceTokenizer(files_of(*args, **how), model=model)


@given(st.text())
def test_any_text_comes_back(text):
    ids = PLAIN.encode(text)
    assert ids.dtype == np.int32
    assert PLAIN.decode(ids) == "".join(part for part in _without_specials(text))


def _without_specials(text):
    for special in folders.SPECIALS:
        text = text.replace(special, "")
    return text


def test_the_vocabulary_ends_after_the_largest_id():
    assert isinstance(PLAIN, Tokenizer)
    assert PLAIN.vocab_size == 1 + max(Library.from_str(byte_level_json()).get_vocab().values())


def test_encoding_takes_spelled_out_special_tokens_and_adds_none():
    np.testing.assert_array_equal(
        PLAIN.encode("<|im_start|>1<|im_end|>"), [IM_START, *PLAIN.encode("1"), IM_END]
    )
    assert not {END_OF_TEXT, IM_START, IM_END, BEGIN} & set(PLAIN.encode("im_end").tolist())


def test_decoding_omits_special_tokens_and_padding_of_the_vocabulary():
    ids = [BEGIN, *PLAIN.encode(" a b"), PLAIN.vocab_size, 151_935, IM_END, END_OF_TEXT]
    assert PLAIN.decode(np.array(ids, np.int32)) == " a b"


@pytest.mark.parametrize("tokenizer", [byte_level_json, byte_fallback_json])
@given(text=st.text(), cut=st.integers(0, 20))
def test_the_bytes_of_tokens_add_up_to_the_text(tokenizer, text, cut):
    """A token may be part of a character. The expected bytes are UTF-8; Llama 2's normalizer adds a space first."""
    read, space = _decoding(tokenizer), b" " * (tokenizer is byte_fallback_json)
    written = "".join(part for part in _without_specials(text)).replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    for special in ("<unk>", "<s>", "</s>"):
        written = written.replace(special, "")
    ids = read.encode_plain(written).tolist()
    found = [read.token_bytes(token) for token in [*ids[:cut], read.eos_id, *ids[cut:]]]
    assert b"".join(found) == (space + written.encode("utf-8") if written else b"")


@cache
def _decoding(tokenizer):
    config = {"eos_token": "</s>", "pad_token": "<unk>"} if tokenizer is byte_fallback_json else {}
    return made(tokenizer(), **config)


def test_special_tokens_have_no_bytes_and_unknown_ids_return_none():
    assert [PLAIN.token_bytes(token) for token in (END_OF_TEXT, IM_START, IM_END)] == [b"", b"", b""]
    assert [PLAIN.token_bytes(token) for token in (-1, PLAIN.vocab_size, 2**40)] == [None] * 3


def test_an_added_token_that_is_not_special_has_the_bytes_of_its_text():
    library = Library.from_str(byte_level_json())
    library.add_tokens(
        [AddedToken(mark, normalized=False, special=False) for mark in ("<think>", "\u65e5 x")]
    )
    tokenizer = made(library.to_str())
    for mark in ("<think>", "\u65e5 x"):
        [token] = tokenizer.encode(mark).tolist()
        assert tokenizer.token_bytes(token) == mark.encode("utf-8")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()])
def test_bytes_that_depend_on_neighbouring_tokens_are_unknown(decoder):
    library = Library.from_str(byte_level_json())
    described = {
        **json.loads(library.to_str()),
        "decoder": None if decoder is None else json.loads(decoder.__getstate__()),
    }
    assert made(json.dumps(described)).token_bytes(50) is None


def test_a_tokenizer_with_dropout_is_refused():
    content = json.loads(byte_level_json())
    content["model"]["dropout"] = 0.5
    files = {**files_of(), "tokenizer.json": json.dumps(content).encode()}
    with pytest.raises(ValueError, match=r"dropout is 0\.5"):
        HuggingFaceTokenizer(files)


@pytest.mark.parametrize(
    ("config", "generation", "model", "expected"),
    [
        ({}, None, None, (IM_END,)),
        ({}, {"eos_token_id": END_OF_TEXT}, None, (IM_END, END_OF_TEXT)),
        # Llama 3's instruction-tuned models have a list; the tokenizer's own id comes first.
        ({}, {"eos_token_id": [END_OF_TEXT, BEGIN, IM_END]}, {"eos_token_id": 1}, (IM_END, END_OF_TEXT, BEGIN, 1)),
        ({"eos_token": None}, None, {"eos_token_id": [1, 2]}, (1, 2)),
        ({"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}, None, None, (END_OF_TEXT,)),
    ],
)  # fmt: skip
def test_every_end_token_of_the_folder_ends_a_response(config, generation, model, expected):
    tokenizer = made(generation=generation, model=model, **config)
    assert tokenizer.stop_ids == expected
    assert tokenizer.eos_id == expected[0]


@pytest.mark.parametrize(
    ("config", "generation", "model", "expected"),
    [
        ({}, {"pad_token_id": 1}, {"pad_token_id": 3}, END_OF_TEXT),
        ({"pad_token": None}, None, {"pad_token_id": 3}, 3),
        ({"pad_token": None}, None, {"pad_token_id": -1}, IM_END),
        ({"pad_token": None}, None, None, IM_END),
    ],
)
def test_the_padding_is_the_first_one_named_or_the_end_token(config, generation, model, expected):
    assert made(generation=generation, model=model, **config).pad_id == expected


def test_special_tokens_of_an_older_folder_are_read_from_their_map():
    files = files_of(eos_token=None)
    del files["tokenizer_config.json"]
    files["special_tokens_map.json"] = b'{"eos_token": {"content": "<|endoftext|>"}}'
    assert HuggingFaceTokenizer(files).stop_ids == (END_OF_TEXT,)


@pytest.mark.parametrize(
    ("tokenizer", "config", "first"),
    [
        (byte_level_json(), {"bos_token": "<|im_start|>"}, []),  # SmolLM2: a name, but nothing is added
        (byte_level_json(), {"bos_token": "<|begin_of_text|>", "add_bos_token": True}, []),
        (with_beginning(byte_level_json()), {"bos_token": "<|begin_of_text|>"}, [BEGIN]),  # Llama 3
        (
            with_beginning(byte_level_json()),
            {"bos_token": "<|begin_of_text|>", "add_bos_token": False},
            [BEGIN],
        ),
    ],
)
def test_plain_prompts_begin_with_the_token_of_the_post_processor(tokenizer, config, first):
    found = made(tokenizer, **config)
    np.testing.assert_array_equal(found.encode_prompt("12 + 34"), [*first, *PLAIN.encode("12 + 34")])
    np.testing.assert_array_equal(found.encode("12 + 34"), PLAIN.encode("12 + 34"))
    again = found.encode_prompt("<|begin_of_text|>1")
    np.testing.assert_array_equal(again, [BEGIN, *PLAIN.encode("1")])  # never added twice


def test_truncation_and_padding_in_the_file_are_ignored():
    library = Library.from_str(byte_level_json())
    library.enable_truncation(2)
    library.enable_padding(length=50)
    text = "a text of more than two tokens and fewer than fifty"
    np.testing.assert_array_equal(made(library.to_str()).encode(text), PLAIN.encode(text))


def test_the_template_file_overrides_the_configuration():
    messages = [{"role": "user", "content": "1"}]
    assert made(chat_template="old").chat_template.render(messages).startswith("<|im_start|>user")
    assert made(template=None, chat_template="old").chat_template.render(messages) == "old"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ eos_token }}"}]
    assert made(template=None, chat_template=named).chat_template.render(messages) == "d<|im_end|>"
    assert made(template=None, chat_template=named[:1]).chat_template is None
    assert made(template=None).chat_template is None


def test_the_template_for_tools_in_a_folder_of_its_own_is_read_and_written_back(tmp_path):
    """As transformers 5 writes several templates."""
    tools = {"additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    save_tokenizer(HuggingFaceTokenizer(files_of() | tools), tmp_path / "copy")
    template = load_tokenizer(tmp_path / "copy").chat_template
    assert (template.source, template.with_tools.source) == (folders.CHATML, "{{ tools }}")


def test_files_are_written_back_byte_for_byte(tmp_path):
    files = files_of(generation={"eos_token_id": [2, 0]}, bos_token="<|im_start|>")
    files["special_tokens_map.json"] = b'{"eos_token":    "<|im_end|>"}\n\n'
    found = load_tokenizer(write(tmp_path / "read", files))
    save_tokenizer(found, tmp_path / "written")
    assert {path.name: path.read_bytes() for path in (tmp_path / "written").iterdir()} == files
    assert load_tokenizer(tmp_path / "written").stop_ids == found.stop_ids


def test_a_saved_generation_config_lists_the_end_token_of_the_template(tmp_path):
    """Other programs would otherwise not stop where supervised responses end."""
    files = files_of(generation={"eos_token_id": 0, "temperature": 0.7}, eos_token="<|endoftext|>")
    found = load_tokenizer(write(tmp_path / "read", files))
    save_tokenizer(found, tmp_path / "written", stop_ids(found))
    generation = json.loads((tmp_path / "written" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == ([0, 2], 0.7)
    written = {path.name: path.read_bytes() for path in (tmp_path / "written").iterdir()}
    assert {**files, "generation_config.json": written["generation_config.json"]} == written
    assert load_tokenizer(tmp_path / "written").eos_id == 0


def test_end_tokens_that_only_the_model_s_configuration_named_survive_saving(tmp_path):
    folder = write(tmp_path / "read", files_of(pad_token=None))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [2, 0], "pad_token_id": 1}))
    save_tokenizer(load_tokenizer(folder), tmp_path / "written")
    found = load_tokenizer(tmp_path / "written")
    assert (found.stop_ids, found.pad_id) == ((2, 0), 1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (files_of(eos_token=None), "add eos_token to tokenizer_config.json"),
        (files_of(eos_token="<|eot_id|>"), r"eos_token '<\|eot_id\|>' is not in the vocabulary"),
        (files_of(split_special_tokens=True), "split_special_tokens .*; set it to false in this file"),
    ],
)
def test_files_that_do_not_fit_are_refused(files, message):
    with pytest.raises(ValueError, match=message):
        HuggingFaceTokenizer(files)


def test_the_decoder_drops_only_the_first_space_of_a_text():
    """Stop strings rely on it: Llama 2's decoder drops one leading space, whatever follows."""
    found = HuggingFaceTokenizer(files_of(byte_fallback_json(), eos_token="</s>", pad_token=None))
    assert found.decode(found.encode("END é")) == "END é"
    assert found.decode(found.encode("END é")[1:]) == "D é"


LLAMA_2 = HuggingFaceTokenizer(files_of(byte_fallback_json(), eos_token="</s>", pad_token=None))


@pytest.mark.parametrize("tokenizer", [LLAMA_2, HuggingFaceTokenizer(files_of()), ByteTokenizer()])
@pytest.mark.parametrize("text", [" END", "    END\n", "END", "\n  a", "é"])
@pytest.mark.parametrize("before", [None, "a:", "a\n", "a ", "é", "<end>"])
def test_decoding_reverses_encoding_after_any_tokens(tokenizer, text, before):
    """The body of a function keeps its indentation after a plain prompt, and a response after a special token gains no space."""
    after = before and np.array([tokenizer.eos_id] if before == "<end>" else tokenizer.encode(before))
    assert tokenizer.decode(tokenizer.encode(text, after), after) == text


def test_a_character_whose_first_byte_is_before_the_text_is_replaced():
    """é has the bytes C3 A9."""
    first, second = LLAMA_2.encode("aé")[-2:]
    assert LLAMA_2.decode(np.array([second]), np.array([first])) == "\ufffd"


def added(*tokens, at=None):
    """The tokenizer with further added tokens: names of special tokens. With `at`, the ids begin there."""
    described = json.loads(byte_level_json())
    first = 320 if at is None else at
    for number, content in enumerate(tokens, start=first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        described["added_tokens"].append({"id": number, "content": content, "special": True, **flags})
    return json.dumps(described)


WITHOUT = json.dumps({**json.loads(byte_level_json()), "added_tokens": []})
"""The special tokens are in the vocabulary, but are not added tokens."""
DECODER = {
    str(number): {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    for number, text in enumerate(folders.SPECIALS)
}  # fmt: skip


@pytest.mark.parametrize(
    ("tokenizer", "config", "ids", "text"),
    [
        (WITHOUT, {"additional_special_tokens": ["<|im_start|>"]}, [IM_START, 68, IM_END, 202, 69], "a\nb"),
        (WITHOUT, {"extra_special_tokens": {"x": "<|im_start|>"}}, [IM_START, 68, IM_END, 202, 69], "a\nb"),
        (WITHOUT, {"added_tokens_decoder": DECODER}, [IM_START, 68, IM_END, 202, 69], "a\nb"),
        (
            byte_level_json(),
            {"added_tokens_decoder": {"2": {**DECODER["2"], "rstrip": True}}},
            [IM_START, 68, IM_END, 69],
            "ab",
        ),
        (
            byte_level_json().replace('"special":true', '"special":false'),
            {},
            [IM_START, 68, IM_END, 202, 69],
            "<|im_start|>a\nb",
        ),
    ],
)
def test_special_tokens_are_read_from_the_configuration_too(tokenizer, config, ids, text):
    """From transformers 5.24: AutoTokenizer.from_pretrained(FOLDER), encode("<|im_start|>a<|im_end|>\\nb") and decode with
    skip_special_tokens=True, with "tokenizer_class": "PreTrainedTokenizerFast"."""
    found = made(tokenizer, **config)
    spelled = "<|im_start|>a<|im_end|>\nb"
    assert found.encode(spelled).tolist() == ids
    assert found.decode(found.encode(spelled)) == text
    assert IM_END not in found.encode_plain(spelled)


X = {**DECODER["0"], "content": "<x>", "special": False}


@pytest.mark.parametrize(
    ("config", "older", "ids", "text"),
    [
        ({"added_tokens_decoder": {"320": X}, "additional_special_tokens": ["<x>"]}, {}, [320, 69], "<x>b"),
        (
            {"added_tokens_decoder": {"320": X}, "extra_special_tokens": {"x_token": "<x>"}},
            {},
            [320, 69],
            "b",
        ),
        ({"added_tokens_decoder": {"1": {**X, "content": "<|im_start|>"}}}, {}, [31, 91, 33, 69], "<x>b"),
        ({}, {"<x>": 320}, [320, 69], "<x>b"),
        ({"additional_special_tokens": ["<x>"]}, {"<x>": 320}, [320, 69], "b"),
        ({"added_tokens_decoder": {"320": {**X, "content": "<y>"}}}, {"<x>": 320}, [31, 91, 33, 69], "<x>b"),
        ({"additional_special_tokens": ["<y>", "<x>"]}, {}, [321, 69], "b"),
        ({"unk_token": "<x>", "bos_token": "<z>"}, {}, [321, 69], "b"),
    ],
)
def test_new_tokens_of_the_configuration_and_of_added_tokens_json(config, older, ids, text, tmp_path):
    """From transformers 5.24, as above: encode("<|im_start|><x>b") and decode with skip_special_tokens=True."""
    files = files_of(**config) | {"added_tokens.json": json.dumps(older).encode()}
    save_tokenizer(load_tokenizer(write(tmp_path / "read", files)), tmp_path / "written")
    found = load_tokenizer(tmp_path / "written")
    assert found.encode("<|im_start|><x>b").tolist() == [IM_START, *ids]
    assert found.decode(np.array([IM_START, *ids])) == text


def test_a_padding_token_of_added_tokens_json_and_a_new_token_behind_it_are_found():
    files = files_of(pad_token="<x>", unk_token="<y>") | {"added_tokens.json": b'{"<x>": 320}'}
    found = HuggingFaceTokenizer(files, model={"vocab_size": 322})
    assert (found.pad_id, found.encode("<y>").tolist()) == (320, [321])


def test_marked_text_keeps_the_special_tokens_inside_a_text():
    tokenizer = made(added("<tool_call>", "</tool_call>"))
    ids = tokenizer.encode('a<tool_call>{"b"}</tool_call><|im_end|>')
    assert tokenizer.decode(ids) == 'a{"b"}'
    assert tokenizer.marked_text(ids) == 'a<tool_call>{"b"}'
    assert (
        tokenizer.marked_text(tokenizer.encode("<tool_call><tool_call>1<|im_end|>"))
        == "<tool_call><tool_call>1"
    )
    assert tokenizer.marked_text(tokenizer.encode("<|im_end|>")) == tokenizer.marked_text(ids[:0]) == ""


SIZE = 320
"""The number of ids of `byte_level_json`, which are the rows of the model's table below."""


def test_marks_of_thoughts_keep_their_text():
    """Mistral's and gpt-oss's files call them special. Without them, a response that is cut off in its thoughts would look like an answer."""
    for text in ("[THINK]7?[/THINK]8", "<|channel|>analysis<|message|>7?<|end|><|start|>assistant"):
        marks = re.findall(r"\[/?THINK\]|<.*?>", text)
        tokenizer = made(added(*marks))
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not tokenizer.special_tokens.keys() & {*marks}
    tokenizer = made(added("<|end|>"))  # the end of a turn in other families
    assert tokenizer.decode(tokenizer.encode("8<|end|>")) == "8"


def test_a_special_token_beyond_the_table_is_accepted_if_nothing_needs_it():
    """Gemma 3's 1B and 270M models define <image_soft_token>, whose id is the number of rows."""
    tokenizer = made(
        added("<image_soft_token>"), model={"vocab_size": SIZE}, image_token="<image_soft_token>"
    )
    assert tokenizer.vocab_size == SIZE
    check_vocabulary(tokenizer, SIZE)
    assert made(added("<image_soft_token>"), model={"vocab_size": SIZE + 1}).vocab_size == SIZE + 1
    text = "an <image_soft_token>"
    for encode in (
        tokenizer.encode,
        tokenizer.encode_prompt,
        tokenizer.encode_plain,
        tokenizer.encode_guarded,
    ):
        np.testing.assert_array_equal(encode(text), PLAIN.encode(text))


@pytest.mark.parametrize(
    "how",
    [
        {"eos_token": "<x>"},
        {"pad_token": "<x>"},
        {"template": "<x>{{ messages[0].content }}"},
        {"template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<x>"},
    ],
)
def test_a_special_token_beyond_the_table_is_refused_if_it_can_be_used(how):
    tokenizer = made(added("<x>"), model={"vocab_size": SIZE}, **how)
    with pytest.raises(
        ValueError, match=f"has {SIZE + 1} ids and the model's vocabulary has only {SIZE} rows"
    ):
        check_vocabulary(tokenizer, SIZE)


def test_an_ordinary_token_and_a_beginning_beyond_the_table_are_refused():
    assert made(model={"vocab_size": 300}).vocab_size == SIZE
    described = json.loads(with_beginning(added("<x>")))
    [_, template] = described["post_processor"]["processors"]
    template["single"][0]["SpecialToken"]["id"] = "<x>"
    template["special_tokens"] = {"<x>": {"id": "<x>", "ids": [SIZE], "tokens": ["<x>"]}}
    assert made(json.dumps(described), model={"vocab_size": SIZE}).vocab_size == SIZE + 1


WRONG = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RIGHT = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+|\p{N}|\s+"


@cache
def large(expression):
    """A byte-level tokenizer with more than 100,000 tokens, and an expression that splits texts."""
    described = json.loads(byte_level_json())
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"<{number}>": number for number in range(len(vocabulary), 100_001)}
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, described["pre_tokenizer"]]}
    return json.dumps(described)


@pytest.mark.parametrize(
    ("tokenizer", "model", "warns"),
    [
        (WRONG, {"model_type": "mistral"}, True),
        (WRONG, {"model_type": "mistral", "transformers_version": "5.0.0"}, False),
        (WRONG, {"model_type": "llama"}, False),
        (RIGHT, {"model_type": "mistral"}, False),
    ],
)
def test_the_wrong_expression_of_mistrals_tokenizer_is_named_as_in_transformers(tokenizer, model, warns):
    """The conditions of transformers 5.24 for a folder; we also compare the expression."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made(large(tokenizer), model=model)
    assert [("fix_mistral_regex=True" in str(one.message)) for one in caught] == [True] * warns
