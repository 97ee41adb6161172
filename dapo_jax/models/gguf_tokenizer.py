"""Converts the tokenizer in a GGUF file's metadata to the tokenizer files of a Hugging Face folder: byte-level BPE, and SentencePiece's BPE as in Gemma."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Regular expression that splits text before BPE merges: contractions, words, numbers up to a maximum length, punctuation, white space."""

_SPLITS: dict[str, str | None] = {"smollm": None, "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""The regular expression for each value of tokenizer.ggml.pre. SmolLM (None) splits digits, and then uses the GPT-2 expression in `ByteLevel`."""

_ORDINARY, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Values of tokenizer.ggml.token_type."""

_ENDS = (
    "<eos>", "<end_of_turn>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<EOT>"
)  # fmt: skip
"""Tokens that end a response, as in llama.cpp, whatever their type. A file contains the ids of only a few of them."""


def tokenizer_files(metadata: Mapping[str, Any], where: object) -> dict[str, str]:
    """Returns the contents of tokenizer.json, tokenizer_config.json and generation_config.json, by file name.
    Raises ValueError if the tokenizer is missing, or its kind is not supported. The message names the kind."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    names = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in names}
    special = {name: metadata[key] for name, key in keys.items() if key in metadata}
    if outside := {name: number for name, number in special.items() if not 0 <= number < len(tokens)}:
        raise ValueError(f"{where}: special tokens {outside} are outside the vocabulary of {len(tokens)}")
    kinds = {metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")}
    # If the key is absent, these kinds add the token, as in llama.cpp.
    adds = metadata.get("tokenizer.ggml.add_bos_token", bool(kinds & {"llama", "llama-bpe"}))
    config = {f"{name}_token": tokens[number] for name, number in special.items()} | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(adds),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    }
    name = "tokenizer.chat_template"
    named = {key.removeprefix(f"{name}."): metadata[key] for key in metadata if key.startswith(f"{name}.")}
    if name in metadata:
        config["chat_template"] = {"default": metadata[name], **named} if named else metadata[name]
    begins = tokens[special["bos"]] if config["add_bos_token"] and "bos" in special else None
    return {
        "tokenizer.json": _tokenizer(metadata, where, begins),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json(special_ids(metadata)),
    }


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bos, eos and pad ids by their keys in config.json. eos is a list if several tokens end a response."""
    keys = [f"tokenizer.ggml.{key}_token_id" for key in ("bos", "padding", "eos", "eot", "eom")]
    bos, pad, *named = map(metadata.get, keys)
    spelled = [i for i, token in enumerate(metadata.get("tokenizer.ggml.tokens", [])) if token in _ENDS]
    ends = list(dict.fromkeys(each for each in (*named, *spelled) if each is not None))
    found = {"bos": bos, "eos": ends[0] if len(ends) == 1 else ends or None, "pad": pad}
    return {f"{name}_token_id": value for name, value in found.items() if value is not None}


def _tokenizer(metadata: Mapping[str, Any], where: object, begins: str | None) -> str:
    """Returns the content of tokenizer.json. `begins` is the token that is prepended to every text, if any."""
    from tokenizers import AddedToken, processors

    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if (model := metadata.get("tokenizer.ggml.model")) not in makers:
        raise ValueError(
            f"{where}: tokenizer.ggml.model {model!r} is not supported (only {' and '.join(map(repr, makers))})"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [_ORDINARY] * len(tokens)
    kinds = [_CONTROL if token in _ENDS else kind for token, kind in zip(tokens, kinds, strict=True)]
    if model == "llama":
        # The text is split after spaces are replaced, but files contain user-defined tokens with spaces.
        pairs = zip(tokens, kinds, strict=True)
        tokens = [token.replace(" ", "▁") if kind == _USER_DEFINED else token for token, kind in pairs]
    # Unused ids only pad the embedding, so they are not part of the tokenizer's vocabulary.
    pairs = enumerate(zip(tokens, kinds, strict=True))
    vocabulary = {token: i for i, (token, kind) in pairs if kind != _UNUSED}
    try:
        made = makers[model](metadata, where, vocabulary, kinds)
    except Exception as error:  # `tokenizers` does not raise a more specific type
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{where}: tokens and merges do not match: {error}") from error
    if begins is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{begins} $A",
            pair=f"{begins} $A {begins} $B",
            special_tokens=[(begins, vocabulary[begins])],
        )
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    made.add_tokens(added)
    return made.to_str(pretty=True)


def _byte_level(
    metadata: Mapping[str, Any], where: object, vocabulary: dict[str, int], _kinds: Sequence[int]
) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    split = metadata.get("tokenizer.ggml.pre")
    if split not in _SPLITS:
        raise ValueError(
            f"{where}: tokenizer.ggml.pre {split!r} is not supported (only {', '.join(map(repr, _SPLITS))})"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    # Llama 3 encodes a word that is itself a token directly, without applying merges.
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    expression = _SPLITS[split]
    first = Digits(individual_digits=True)
    if expression is not None:
        first = Split(Regex(expression), behavior="isolated")
    made.pre_tokenizer = Sequence([first, ByteLevel(add_prefix_space=False, use_regex=expression is None)])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    if split == "qwen2":
        made.normalizer = normalizers.NFC()
    return made


def _sentencepiece(
    metadata: Mapping[str, Any], where: object, vocabulary: dict[str, int], kinds: Sequence[int]
) -> "Tokenizer":
    """Returns SentencePiece's BPE. It joins the two neighbours whose union has the highest score, and user-defined tokens before all others.

    Each token can be the union of several pairs, so the merges of `tokenizers` are all of these pairs, in the order of falling scores.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores, prefix = metadata.get("tokenizer.ggml.scores"), metadata.get("tokenizer.ggml.add_space_prefix")
    if prefix is not False or scores is None or len(scores) != len(kinds):
        raise ValueError(
            f"{where}: tokenizer.ggml.model 'llama' is only supported with tokenizer.ggml.add_space_prefix=False, as in Gemma, and a score for each of "
            f"the {len(kinds)} tokens; this file has {prefix} and {0 if scores is None else len(scores)} scores. Use the model's Hugging Face folder instead"
        )
    rank = {_USER_DEFINED: 0, _ORDINARY: 1}
    joined = {token: i for token, i in vocabulary.items() if kinds[i] in rank}
    order = sorted(joined, key=lambda token: (rank[kinds[joined[token]]], -scores[joined[token]]))
    merges = []
    for token in order:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in joined and right in joined]
        merges += sorted(pairs, key=lambda pair: (joined[pair[0]], joined[pair[1]]))
    unknown = metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.unknown_token_id"]]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
