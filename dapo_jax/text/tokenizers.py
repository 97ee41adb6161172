"""The `Tokenizer` protocol, two tokenizers that need no training, and functions that load and save tokenizers.

`encode` adds no special tokens and `decode` omits them, so callers append end tokens themselves. In the two tokenizers here,
ids 0 and 1 are the padding token and the end token. `dapo_jax.text.huggingface` loads the tokenizers of pretrained models.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32

from dapo_jax.storage import file_bytes, files_of, path_of, write_whole
from dapo_jax.text.chat import ChatTemplate
from dapo_jax.text.plain_json import read_object
from dapo_jax.text.special_tokens import Before

PAD_ID = 0
EOS_ID = 1
_SPECIALS = 2
"""Number of special ids: the padding token and the end token. Ordinary tokens follow them."""

_FILE_NAME, _TEMPLATE_NAME = "tokenizer.json", "chat_template.jinja"


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

    def decode(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """Returns the text of `ids` without special tokens."""


@dataclass(frozen=True)
class _Plain:
    """Base class of tokenizers in which no text can spell out a special token."""

    pad_id: int = field(default=PAD_ID, init=False)
    eos_id: int = field(default=EOS_ID, init=False)
    stop_ids: tuple[int, ...] = field(default=(EOS_ID,), init=False)
    chat_template: ChatTemplate | None = field(default=None, compare=False, kw_only=True)

    def encode_plain(self: "Tokenizer", text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """Does the same as `encode`, because no text can spell out a special token. No token depends on the token before it."""
        return self.encode(text)

    encode_guarded = encode_prompt = encode_plain

    def guarded(self, text: str) -> str:
        """Returns the text unchanged, because it cannot spell out a special token."""
        return text


@dataclass(frozen=True)
class ByteTokenizer(_Plain):
    """Uses one token per UTF-8 byte, so it encodes any text without training. The vocabulary consists of 2 special ids and 256 bytes.

    >>> ByteTokenizer().encode("A=").tolist()
    [67, 63]
    """

    vocab_size: int = field(default=_SPECIALS + 256, init=False)

    def encode(self, text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """Returns the bytes of `text`, offset by the number of special ids."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32) + np.int32(_SPECIALS)

    def decode(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """Returns the text of `ids`. Bytes that are not valid UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        return bytes(_ordinary(ids, self.vocab_size)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the byte that the token represents, if any, or None for an id outside the vocabulary."""
        return bytes(_ordinary(np.array([token]), self.vocab_size)) if 0 <= token < self.vocab_size else None


@dataclass(frozen=True)
class CharTokenizer(_Plain):
    """Uses one token per character of a fixed alphabet. Ids follow the alphabet's order, after the special ids.

    >>> CharTokenizer("0123456789+=").encode("1+2").tolist()
    [3, 12, 4]

    Raises:
        ValueError: the alphabet is empty or repeats a character.
    """

    alphabet: str

    def __post_init__(self) -> None:
        repeated = sorted({char for char in self.alphabet if self.alphabet.count(char) > 1})
        if repeated or not self.alphabet:
            problem = f"repeats {repeated}" if repeated else "is empty"
            raise ValueError(f"alphabet {self.alphabet!r} {problem}; give each character once")

    @property
    def vocab_size(self) -> int:
        """Number of characters in the alphabet plus the 2 special ids."""
        return _SPECIALS + len(self.alphabet)

    def encode(self, text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of the characters of `text`.

        Raises:
            ValueError: a character is not in the alphabet.
        """
        places = [self.alphabet.find(char) for char in text]
        if -1 in places:
            position = places.index(-1)
            raise ValueError(
                f"character {text[position]!r} at position {position} of {text!r} is not in the tokenizer's "
                f"alphabet {self.alphabet!r}; remove it, or use a tokenizer whose alphabet has it"
            )
        return np.array(places, dtype=np.int32) + np.int32(_SPECIALS)

    def decode(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """Returns the text of `ids`.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        return "".join(self.alphabet[place] for place in _ordinary(ids, self.vocab_size))

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes of the character that the token represents, if any, or None for an id outside the vocabulary."""
        return self.decode(np.array([token])).encode("utf-8") if 0 <= token < self.vocab_size else None


def named_tokenizer(name: str) -> ByteTokenizer | CharTokenizer:
    """Returns the tokenizer named `byte` or `char:ALPHABET`.

    Raises:
        ValueError: the name is unknown.
    """
    kind, _, alphabet = name.partition(":")
    if kind not in ("byte", "char"):
        raise ValueError(f"model.tokenizer={name!r} must be byte, or char:ALPHABET")
    return CharTokenizer(alphabet) if kind == "char" else ByteTokenizer()


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str], ends: Sequence[int] = ()) -> None:
    """Writes the tokenizer's files to `folder`, which is created if necessary. The files also define the end tokens `ends`.

    Raises:
        ValueError: the tokenizer is neither from this module nor from a Hugging Face folder.
    """
    from dapo_jax.text.huggingface import HuggingFaceTokenizer  # loads the `tokenizers` library

    place = path_of(folder)
    place.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save(folder, ends)
        return
    if isinstance(tokenizer, CharTokenizer):
        content = {"type": "dapo_jax.char", "alphabet": tokenizer.alphabet}
    elif isinstance(tokenizer, ByteTokenizer):
        content = {"type": "dapo_jax.byte"}
    else:
        raise ValueError(
            f"a {type(tokenizer).__name__} cannot be written to a model folder; use a ByteTokenizer, a CharTokenizer or a "
            "HuggingFaceTokenizer"
        )
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    write_whole(place / _FILE_NAME, text.encode("utf-8"))
    if tokenizer.chat_template is not None:
        write_whole(place / _TEMPLATE_NAME, tokenizer.chat_template.source.encode("utf-8"))


def token_ids(tokenizer: Tokenizer) -> Mapping[str, int | list[int]]:
    """Returns the ids of special tokens other than end and padding tokens, by their keys in a model's files, such as `bos_token_id`."""
    return getattr(tokenizer, "token_ids", {})


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Returns the bytes that a token adds to a text, which may be part of a character. A special token adds no bytes.

    Returns None if the id is outside the vocabulary, if the token's text depends on its neighbours, or if the tokenizer has
    no `token_bytes` method.
    """
    own = getattr(tokenizer, "token_bytes", None)
    return None if own is None else own(token)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer from a model folder that `save_tokenizer` or a Hugging Face library has written.

    Raises:
        ValueError: tokenizer.json is missing, is not JSON, or has an unknown type.
    """
    path = path_of(folder) / _FILE_NAME
    try:
        described = read_object(file_bytes(path), path)
        if isinstance(described.get("model"), dict):
            from dapo_jax.text.huggingface import HuggingFaceTokenizer

            return HuggingFaceTokenizer.load(folder)
        template = files_of(path.parent, (_TEMPLATE_NAME,)).get(_TEMPLATE_NAME)
    except OSError as error:
        raise ValueError(
            f"cannot read a tokenizer from {path}: {error.strerror or error}; a model folder needs this file. If the folder has an older "
            "format, convert it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from error
    kind = described.get("type")
    name = str(path.parent / _TEMPLATE_NAME)
    chat_template = None if template is None else ChatTemplate(template, name=name)
    if kind == "dapo_jax.byte":
        return ByteTokenizer(chat_template=chat_template)
    if kind != "dapo_jax.char":
        raise ValueError(
            f"{path} has the tokenizer type {kind!r}; the known types are 'dapo_jax.byte' and 'dapo_jax.char', and a "
            "Hugging Face tokenizer has a 'model' instead"
        )
    return CharTokenizer(str(described.get("alphabet", "")), chat_template=chat_template)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that the model has an embedding row for each token id. Extra rows are common, because models pad their vocabulary.

    Raises:
        ValueError: `tokenizer.vocab_size` is larger than `vocab_size`.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model's vocabulary has only {vocab_size} rows: ids from "
            f"{vocab_size} on would have no embedding; use the tokenizer that the model was trained with"
        )


def _ordinary(ids: Int[np.ndarray, " tokens"], vocab_size: int) -> Iterable[int]:
    """Returns the ids that are not special, renumbered from 0."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"token {int(outside[0])} is outside the tokenizer's vocabulary of {vocab_size}; "
            "the model's vocab_size must equal the tokenizer's"
        )
    return (ids[ids >= _SPECIALS] - _SPECIALS).tolist()
