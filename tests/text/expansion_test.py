"""Tokenizers that make a little text into a lot are refused before they are loaded."""

import json

import pytest

from dapo_jax.text.expansion import check_expansion
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from tests.text.folders import byte_level_json, files_of


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


TEN = replace("a", "a" * 10)


def nested(depth):
    return TEN if depth == 1 else sequence(TEN, nested(depth - 1))


REFUSED = {
    "twelve inside one another": nested(12),
    "four in a row": sequence(TEN, TEN, TEN, TEN),
    "one long content": replace("a", "b" * 1001),
    "by two letters in turn": sequence(*[replace("a", "b" * 40), replace("b", "a" * 40)] * 2),
    "by way of capitals": sequence(*[replace("a", "A" * 40), {"type": "Lowercase"}] * 2),
    "a regular expression": sequence(*[replace("[ab]", "b" * 40, "Regex")] * 2),
    "between all characters": sequence(*[replace("x*", "b" * 40, "Regex")] * 2),
    "an empty text": sequence(*[replace("", "b" * 40)] * 2),
    "what Python cannot read": sequence(*[replace("\\p{L}*", "b" * 40, "Regex")] * 2),
}

TAKEN = {
    "SentencePiece's": sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
    # None of them makes what another takes: 3 characters of one, not 3^60.
    "many that are apart": sequence(*[replace(chr(0x2150 + n), "1/2") for n in range(60)]),
    "spaces": sequence(*[replace(" {2,}", " ", "Regex")] * 20),
    "none": None,
    "what is none": {"type": "Replace", "pattern": 3, "content": None},
}


@pytest.mark.parametrize("normalizer", REFUSED.values(), ids=REFUSED)
def test_what_may_grow_a_thousandfold_is_refused_by_name(normalizer):
    with pytest.raises(ValueError, match=r"its Replace steps may make .* characters of one"):
        check_expansion(normalizer, "tokenizer.json")


@pytest.mark.parametrize("normalizer", TAKEN.values(), ids=TAKEN)
def test_what_real_tokenizers_have_is_taken(normalizer):
    check_expansion(normalizer, "tokenizer.json")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_folder_with_such_a_tokenizer_is_refused_before_it_is_loaded(part):
    """12 steps would make 10^12 characters of the one with which a tokenizer is tried out when it is loaded."""
    inside = "normalizers" if part == "normalizer" else "decoders"
    content = json.loads(byte_level_json()) | {part: {"type": "Sequence", inside: [TEN] * 12}}
    files = files_of(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"somewhere/tokenizer.json, {part}: its Replace steps may make 1e\+"
    ):
        HuggingFaceTokenizer(files, place="somewhere")
