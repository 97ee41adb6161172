"""Guards: special tokens in texts from outside are encoded as characters, all other text as usual."""

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.special_tokens import FIRST_GUARD, Guards
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer
from tests.text.folders import byte_fallback_json, byte_level_json, files_of


def test_a_guarded_text_is_restored():
    guards = Guards(["<|im_end|>", "</s>", "[INST]", ""])
    text = "a < b [c] <|im_end|> ü \ue000 \U000f0001"
    guarded = guards.guarded(text)
    assert "<" not in guarded
    assert "[" not in guarded
    assert len(guarded) == len(text)
    assert guards.restored(guarded) == text
    assert guards.guarded("") == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FIRST_GUARD, r"U\+10F000"),
        ("a\U0010f001im_end|>", r"U\+10F001"),
        ("a\ud800", "surrogates not allowed"),
    ],
)
def test_texts_from_outside_cannot_hold_guards(text, message):
    with pytest.raises(ValueError, match=message):
        Guards(["<a>"]).guarded(text)


@pytest.mark.parametrize(
    "text", ["", "the end", "<|im_start|>user\n\n\nthe end<|im_end|>\n", "a<b <|im_end|>", "日本 héllo"]
)
def test_without_special_tokens_guarding_does_not_change_the_ids(text):
    """Tokens span the border between what is guarded and what is not."""
    tokenizer = HuggingFaceTokenizer(files_of())
    for cut in range(len(text) + 1):
        if "<|im" in text[cut:]:
            continue
        guarded = text[:cut] + tokenizer.guarded(text[cut:])
        assert tokenizer.encode_guarded(guarded).tolist() == tokenizer.encode(text).tolist()


def test_a_special_token_made_by_the_normalizer_does_not_count():
    """NFKC turns wide characters into ASCII, in which an added token would be found."""
    made = Tokenizer.from_str(byte_level_json())
    made.normalizer = normalizers.NFKC()
    made.add_tokens([AddedToken("<tool>", normalized=True, special=False)])
    tokenizer = HuggingFaceTokenizer(files_of(made.to_str()))
    number = tokenizer._tokenizer.token_to_id("<tool>")
    wide = "\uff1ctool\uff1e"
    assert number in tokenizer.encode(wide), "so there is something to guard against"
    assert number not in tokenizer.encode_guarded(tokenizer.guarded(wide))
    assert number in tokenizer.encode_guarded("<tool>" + tokenizer.guarded(wide))


def test_tokenizers_without_spelled_special_tokens_guard_nothing():
    for tokenizer in (ByteTokenizer(), CharTokenizer("<ab>")):
        assert tokenizer.guarded("<ab>") == "<ab>"
        assert tokenizer.encode_guarded("<ab>").tolist() == tokenizer.encode("<ab>").tolist()


def test_texts_of_sentencepiece_tokenizers_are_guarded():
    files = files_of(byte_fallback_json(), eos_token="</s>", pad_token="</s>")
    tokenizer = HuggingFaceTokenizer(files)
    ids = tokenizer.encode_guarded("<s>" + tokenizer.guarded("end</s>") + "</s>").tolist()
    assert (ids[0], ids[-1], ids.count(1), ids.count(2)) == (1, 2, 1, 1)
