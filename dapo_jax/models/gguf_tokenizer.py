"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder. Byte-level BPE only."""

import json
from collections.abc import Mapping
from typing import Any

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How text is cut before bytes are merged: contractions, words, numbers of so many digits, punctuation, white space."""

_CUT_BY: dict[str, str | None] = {"smollm": None, "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""tokenizer.ggml.pre -> the expression; SmolLM has digits apart and then GPT-2's, which `ByteLevel` has built in."""

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""tokenizer.ggml.token_type; 1 is an ordinary token."""


def tokenizer_files(metadata: Mapping[str, Any], where: object) -> dict[str, str]:
    """File name -> content: tokenizer.json, tokenizer_config.json, generation_config.json.

    Raises:
        ValueError: there is no tokenizer, or it is of a kind that is not covered; the message names it.
    """
    tokens = _listed(metadata, "tokens", str, where)
    names = (("bos", "bos"), ("eos", "eos"), ("turn", "eot"), ("pad", "padding"), ("unk", "unknown"))
    special = {
        name: metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in names
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    outside = {
        name: number
        for name, number in special.items()
        if not isinstance(number, int) or not 0 <= number < len(tokens)
    }
    if outside:
        raise ValueError(f"{where}: special tokens {outside} are outside the vocabulary of {len(tokens)}")
    special.pop("turn", None)
    config = {f"{name}_token": tokens[number] for name, number in special.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    }
    if "tokenizer.chat_template" in metadata:
        if not isinstance(metadata["tokenizer.chat_template"], str):
            raise ValueError(f"{where}: tokenizer.chat_template is no text")
        config["chat_template"] = metadata["tokenizer.chat_template"]
    begins = tokens[special["bos"]] if config["add_bos_token"] and "bos" in special else None
    return {
        "tokenizer.json": _tokenizer(metadata, where, begins),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json(
            {f"{name}_token_id": ids for name, ids in special_ids(metadata).items()}
        ),
    }


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, eos and pad as config.json has them: eos is a list where a turn and a text end differently."""
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("turn", "eot"), ("pad", "padding"))
    }
    ends = list(dict.fromkeys(each for each in (ids["eos"], ids["turn"]) if each is not None))
    found = {"bos": ids["bos"], "eos": ends[0] if len(ends) == 1 else ends or None, "pad": ids["pad"]}
    return {name: value for name, value in found.items() if value is not None}


def _tokenizer(metadata: Mapping[str, Any], where: object, begins: str | None) -> str:
    """The content of tokenizer.json; `begins` is the token that is put before a text, if one is."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    kind, cut_by = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"{where}: tokenizer.ggml.model {kind!r} is not covered; 'gpt2' (byte-level BPE) is")
    if not isinstance(cut_by, str) or cut_by not in _CUT_BY:
        raise ValueError(
            f"{where}: tokenizer.ggml.pre {cut_by!r} is not covered; {', '.join(map(repr, _CUT_BY))} are"
        )
    tokens = _listed(metadata, "tokens", str, where)
    kinds = _listed(metadata, "token_type", int, where) or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(
            f"{where}: tokenizer.ggml.token_type has {len(kinds)} entries for the {len(tokens)} tokens"
        )
    # Unused ids are there to make the embedding's size a round number.
    vocabulary = {
        token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED
    }
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(metadata, "merges", str, where)]
    try:
        # Llama 3 takes a word that is a token as it is, without looking for merges that lead to it.
        made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut_by == "llama-bpe"))
    except Exception as error:  # `tokenizers` raises plain Exceptions
        raise ValueError(f"{where}: tokens and merges are of no tokenizer: {error}") from error
    expression = _CUT_BY[cut_by]
    if expression is None:
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        steps = [
            pre_tokenizers.Split(Regex(expression), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    if cut_by == "qwen2":
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


def _listed(metadata: Mapping[str, Any], key: str, kind: type, where: object) -> list[Any]:
    """A list in the metadata; empty if there is none."""
    value = metadata.get(f"tokenizer.ggml.{key}") or []
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ValueError(f"{where}: tokenizer.ggml.{key} must be a list of {kind.__name__}")
    return value


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
