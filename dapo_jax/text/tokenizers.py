"""The `Tokenizer` protocol, a tokenizer of bytes, and functions that load and save tokenizers.

`encode` adds no special tokens and `decode` omits them, so callers append end tokens themselves. `dapo_jax.text.huggingface` loads the
tokenizers of pretrained models.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32

from dapo_jax.storage import file_bytes, path_of
from dapo_jax.text.chat import ChatTemplate
from dapo_jax.text.huggingface import ByteTokenizer, CharTokenizer, HuggingFaceTokenizer
from dapo_jax.text.plain_json import read_object
from dapo_jax.text.special_tokens import Before

_FILE_NAME = "tokenizer.json"


@runtime_checkable
class Tokenizer(Protocol):
    """The interface that the library requires of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special ids. Every id is in [0, vocab_size)."""

    @property
    def pad_id(self) -> int:
        """The id of the padding token, which fills unused positions."""

    @property
    def eos_id(self) -> int:
        """The id of the end token of a text. A supervised response to a plain prompt ends with it."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end tokens that the tokenizer's files define, with `eos_id` first. `stop_strings.stop_ids` returns all ids that end a response."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template that renders messages as text, or None if the model does not support conversations."""

    def encode(self, text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of `text`, which follows the tokens `after` (none: any text) or begins a prompt. Adds no special tokens."""

    def encode_plain(self, text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of untrusted text. Special tokens that are spelled out in it are encoded as ordinary characters."""

    def guarded(self, text: str) -> str:
        """Returns untrusted text with guards against special tokens, for use in a chat template (see `special_tokens.Guards`)."""

    def encode_guarded(self, text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of a text with `guarded` parts. Special tokens that these parts spell out are encoded as ordinary characters."""

    def encode_prompt(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of a plain-text prompt, including the beginning-of-text token if the model has one."""

    def decode(self, ids: Int[np.ndarray, " tokens"], after: Before = None) -> str:
        """Returns the text of `ids` without special tokens. They follow the tokens `after`, or begin a text without `after`."""


def named_tokenizer(name: str) -> ByteTokenizer | CharTokenizer:
    """Returns the tokenizer named `byte` or `char:ALPHABET`. Raises ValueError if the name is unknown."""
    kind, _, alphabet = name.partition(":")
    if kind not in ("byte", "char"):
        raise ValueError(f"model.tokenizer={name!r} must be byte, or char:ALPHABET")
    return CharTokenizer(alphabet) if kind == "char" else ByteTokenizer()


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str], ends: Sequence[int] = ()) -> None:
    """Writes the tokenizer's files to `folder`, which is created if necessary. The files also define the end tokens `ends`.

    Raises ValueError if the tokenizer is of another library.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        remedy = "use a ByteTokenizer, a CharTokenizer or a HuggingFaceTokenizer"
        raise ValueError(f"a {type(tokenizer).__name__} cannot be written to a model folder; {remedy}")
    tokenizer.save(folder, ends)


def token_ids(tokenizer: Tokenizer) -> Mapping[str, int | list[int]]:
    """Returns the ids of special tokens other than end and padding tokens, by their keys in a model's files, such as `bos_token_id`."""
    return getattr(tokenizer, "token_ids", {})


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Returns the bytes that a token adds to a text, which may be part of a character. A special token adds no bytes.

    Returns None if the id is outside the vocabulary, if the token's text depends on its neighbours, or if the tokenizer has
    no `token_bytes` method.
    """
    method = getattr(tokenizer, "token_bytes", None)
    return None if method is None else method(token)


def load_tokenizer(folder: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Loads the tokenizer from a folder that `save_tokenizer` or a Hugging Face library has written. For `base`, see `HuggingFaceTokenizer.load`.

    Raises:
        ValueError: tokenizer.json is missing, is not JSON, or does not have the format of Hugging Face tokenizers.
    """
    path = path_of(folder) / _FILE_NAME
    try:
        described = read_object(file_bytes(path), path)
    except OSError as error:
        raise ValueError(
            f"cannot read a tokenizer from {path}: {error.strerror or error}; a model folder needs this file. If the folder has an older "
            "format, convert it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from error
    if isinstance(described.get("model"), dict):
        return HuggingFaceTokenizer.load(folder, base)
    kind, alphabet = (described.get(name) for name in ("type", "alphabet"))
    former = {"dapo_jax.byte": "ByteTokenizer()", "dapo_jax.char": f"CharTokenizer({alphabet!r})"}
    remedy = f"; to convert it, call save_tokenizer({former[kind]}, FOLDER)" if kind in former else ""
    raise ValueError(
        f"{path} has the tokenizer type {kind!r}, but needs a 'model', as Hugging Face tokenizers have{remedy}"
    )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError if the model has no embedding row for a token id. Extra rows are common, because models pad their vocabulary."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model's vocabulary has only {vocab_size} rows: ids from "
            f"{vocab_size} on would have no embedding; use the tokenizer that the model was trained with"
        )
