"""Converts the tokenizer in a GGUF file's metadata to the tokenizer files of a Hugging Face folder. Only byte-level BPE is supported."""

import json
from collections.abc import Mapping
from typing import Any

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Regular expression that splits text before BPE merges: contractions, words, numbers up to a maximum length, punctuation, white space."""

_SPLITS: dict[str, str | None] = {"smollm": None, "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""The regular expression for each value of tokenizer.ggml.pre. SmolLM (None) splits digits, and then uses the GPT-2 expression in `ByteLevel`."""

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Values of tokenizer.ggml.token_type. An ordinary token has type 1."""


def tokenizer_files(metadata: Mapping[str, Any], where: object) -> dict[str, str]:
    """Returns the contents of tokenizer.json, tokenizer_config.json and generation_config.json, by file name.

    Raises:
        ValueError: the tokenizer is missing, or its kind is not supported. The message names the kind.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    names = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in names}
    special = {name: metadata[key] for name, key in keys.items() if key in metadata}
    if outside := {name: number for name, number in special.items() if not 0 <= number < len(tokens)}:
        raise ValueError(f"{where}: special tokens {outside} are outside the vocabulary of {len(tokens)}")
    config = {f"{name}_token": tokens[number] for name, number in special.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    begins = tokens[special["bos"]] if config["add_bos_token"] and "bos" in special else None
    return {
        "tokenizer.json": _tokenizer(metadata, where, begins),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json(special_ids(metadata)),
    }


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bos, eos and pad ids by their keys in config.json. eos is a list if the end tokens of a turn and of a text differ."""
    keys = [f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "eot", "padding")]
    bos, eos, turn, pad = map(metadata.get, keys)
    ends = list(dict.fromkeys(each for each in (eos, turn) if each is not None))
    found = {"bos": bos, "eos": ends[0] if len(ends) == 1 else ends or None, "pad": pad}
    return {f"{name}_token_id": value for name, value in found.items() if value is not None}


def _tokenizer(metadata: Mapping[str, Any], where: object, begins: str | None) -> str:
    """Returns the content of tokenizer.json. `begins` is the token that is prepended to every text, if any."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"{where}: tokenizer.ggml.model {kind!r} is not supported (only 'gpt2')")
    if split not in _SPLITS:
        raise ValueError(
            f"{where}: tokenizer.ggml.pre {split!r} is not supported (only {', '.join(map(repr, _SPLITS))})"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    # Unused ids only pad the embedding, so they are not part of the tokenizer's vocabulary.
    pairs = enumerate(zip(tokens, kinds, strict=True))
    vocabulary = {token: i for i, (token, kind) in pairs if kind != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    try:
        # Llama 3 encodes a word that is itself a token directly, without applying merges.
        made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    except Exception as error:  # `tokenizers` does not raise a more specific type
        raise ValueError(f"{where}: tokens and merges do not match: {error}") from error
    expression = _SPLITS[split]
    first = Digits(individual_digits=True)
    if expression is not None:
        first = Split(Regex(expression), behavior="isolated")
    made.pre_tokenizer = Sequence([first, ByteLevel(add_prefix_space=False, use_regex=expression is None)])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    if split == "qwen2":
        made.normalizer = normalizers.NFC()
    if begins is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{begins} $A",
            pair=f"{begins} $A {begins} $B",
            special_tokens=[(begins, vocabulary[begins])],
        )
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            made.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    return made.to_str(pretty=True)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
