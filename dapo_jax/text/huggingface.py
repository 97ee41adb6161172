"""Tokenizers of real models: the files of a Hugging Face folder, run by the library `tokenizers`. No code of the folder runs.

What a folder says twice or in two ways is settled here:

* The end token is tokenizer_config.json's `eos_token`, which is what instruction-tuned models end a turn with; every
  other end token of generation_config.json and config.json ends a response as well.
* A prompt of plain text begins with the token that begins a text if tokenizer.json's post-processor puts one there, as
  Llama 3's does; `add_bos_token` in tokenizer_config.json counts for nothing beside it, as in transformers 5. It is
  never put there twice.
* Special tokens that are spelled out in a text are encoded as such: that is how chat templates write them.
"""

import base64
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from dapo_jax.plain_json import read_object
from dapo_jax.storage import files_of, path_of, write_whole
from dapo_jax.text.chat import ChatTemplate
from dapo_jax.text.decoders import bytes_of_token
from dapo_jax.text.expansion import check_expansion
from dapo_jax.text.guards import Guards

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json"
)  # fmt: skip
"""The files that a tokenizer is read from, as far as a model folder has them; and the model's config.json, which belongs to the weights."""

_TOKENIZER, _CONFIG, _GENERATION, _TEMPLATE, _SPECIAL_TOKENS = TOKENIZER_FILES
"""The files that are written back byte for byte."""
_OWN_IDS = ("eos_token_id", "pad_token_id")
"""Settled here from all files, see `stop_ids` and `pad_id`."""
_LARGEST_ID = 2**31 - 1
"""Ids are 32-bit integers with a sign."""


class HuggingFaceTokenizer:
    """A tokenizer with the end tokens and the chat template of its model folder."""

    def __init__(
        self, files: Mapping[str, bytes], *, model: Mapping[str, Any] | None = None, place: str = "the folder"
    ) -> None:
        """Reads the files' contents.

        Args:
            files: contents by name: `tokenizer.json` and what there is of `tokenizer_config.json`,
                `generation_config.json`, `chat_template.jinja` and `special_tokens_map.json`.
            model: the model's config.json, for end and padding tokens that are named nowhere else.
            place: where the files are from, for errors.

        Raises:
            ValueError: a file cannot be read, a special token is not in the vocabulary, or no end token is named.
        """
        self.files = {name: files[name] for name in TOKENIZER_FILES if name in files}
        self._place = place
        described = self._json(_TOKENIZER)
        self._decoder = described.get("decoder")
        _check_normalizer(described.get("normalizer"), f"{place}/{_TOKENIZER}")
        for part in ("normalizer", "decoder"):
            check_expansion(described.get(part), f"{place}/{_TOKENIZER}, {part}")
        with self._library("is no file of"):
            self._tokenizer = tokenizers.Tokenizer.from_str(self.files[_TOKENIZER].decode("utf-8"))
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            raise ValueError(
                f"{place}/{_TOKENIZER}: its dropout is {dropout}, so one text has other tokens each time; set it to null there"
            )
        # Some files were saved with the lengths of a training script.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = {**self._json(_SPECIAL_TOKENS), **self._json(_CONFIG)}
        generation, model = self._json(_GENERATION), model or {}
        self._special_tokens = {
            key: text for key, value in config.items() if key.endswith("_token") and (text := _content(value))
        }
        self._vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if self._vocab_size > _LARGEST_ID:
            raise ValueError(
                f"{place}/{_TOKENIZER} has the id {self._vocab_size - 1}; ids are at most {_LARGEST_ID - 1}"
            )
        self._token_ids = self._named_ids(generation, model)
        self._stop_ids = self._end_tokens(generation, model)
        self._pad_id = self._padding(generation, model)
        self._beginning = self._text_beginning()
        self._chat_template = self._template(config.get("chat_template"))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "HuggingFaceTokenizer":
        """Reads a model folder.

        Raises:
            ValueError: as the constructor, or there is no tokenizer.json.
        """
        place, described = path_of(folder), "config.json"
        try:
            files = files_of(place, (*TOKENIZER_FILES, described))
        except OSError as error:
            raise ValueError(f"cannot read a tokenizer from {place}: {error}") from error
        if _TOKENIZER not in files:
            raise ValueError(f"there is no {place / _TOKENIZER}; a tokenizer is read from this file")
        model = files.pop(described, None)
        read = {} if model is None else read_object(model, place / described)
        return cls(files, model=read, place=str(place))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files as they were read. End tokens that only config.json named go into a generation_config.json."""
        place = path_of(folder)
        place.mkdir(parents=True, exist_ok=True)
        named = {**self.token_ids, "eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
        files = {_GENERATION: (json.dumps(named, indent=2) + "\n").encode(), **self.files}
        for name, content in files.items():
            write_whole(place / name, content)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, HuggingFaceTokenizer)
            and self.files[_TOKENIZER] == other.files[_TOKENIZER]
            and (self.stop_ids, self.pad_id) == (other.stop_ids, other.pad_id)
        )

    def __hash__(self) -> int:
        return hash((self.files[_TOKENIZER], self.stop_ids, self.pad_id))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. Models often have more rows: see `check_vocabulary`."""
        return self._vocab_size

    @property
    def pad_id(self) -> int:
        """The padding token, or the end token where the folder names none."""
        return self._pad_id

    @property
    def eos_id(self) -> int:
        """The end token that supervised responses are ended with."""
        return self._stop_ids[0]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every end token that the folder names, `eos_id` first."""
        return self._stop_ids

    @property
    def token_ids(self) -> Mapping[str, int | list[int]]:
        """Ids by their names in config.json, such as `bos_token_id`, but for the end and the padding."""
        return self._token_ids

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The folder's chat template, of several the one named `default`."""
        return self._chat_template

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The ids of `text`; none is added, and special tokens spelled out in it are encoded as such.

        Raises:
            ValueError: text with half a surrogate pair, which is not Unicode.
        """
        text.encode("utf-8")  # which says where the surrogate is
        with self._library("cannot encode this text with"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)

    def encode_plain(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The ids of a text from outside. What is spelled like a special token, or like any other that was added to the vocabulary, such as `<tool_call>`, is
        encoded as the characters that it has.

        Raises:
            ValueError: text with half a surrogate pair.
        """
        text.encode("utf-8")
        with self._library("cannot encode this text with"):
            ids = self._plain.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without the tokens that were added to its vocabulary."""
        described = {**self._json(_TOKENIZER), "added_tokens": [], "post_processor": None}
        with self._library("without its added tokens is no file of"):
            plain = tokenizers.Tokenizer.from_str(json.dumps(described))
        plain.no_truncation()
        plain.no_padding()
        return plain

    def guarded(self, text: str) -> str:
        """The text with other characters in place of those that added tokens begin with; `encode_guarded` puts them back.

        Raises:
            ValueError: half a surrogate pair, or a character that stands for others, see `text.guards`.
        """
        return self._guards.guarded(text)

    def encode_guarded(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The ids of a text in which parts are `guarded`: added tokens are only those that begin with their own character.

        Raises:
            ValueError: text with half a surrogate pair.
        """
        text.encode("utf-8")
        with self._library("cannot encode this text with"):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        parts: list[Int32[np.ndarray, " tokens"]] = []
        done = 0
        for number, (begin, end) in zip(found.ids, found.offsets, strict=True):
            # One that only the normalizer makes of other characters is none that was written.
            if number in self._added and self._added[number] == text[begin:end].strip():
                parts += [
                    self.encode_plain(self._guards.restored(text[done:begin])),
                    np.array([number], dtype=np.int32),
                ]
                done = end
        return np.concatenate([*parts, self.encode_plain(self._guards.restored(text[done:]))])

    @cached_property
    def _added(self) -> Mapping[int, str]:
        """The tokens that were added to the vocabulary, by their ids."""
        with self._library("has no added tokens that can be read with"):
            return {
                number: token.content for number, token in self._tokenizer.get_added_tokens_decoder().items()
            }

    @cached_property
    def _guards(self) -> Guards:
        return Guards(self._added.values())

    def encode_prompt(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The ids of a prompt that is plain text, behind the token that begins a text if the model knows one."""
        ids, first = self.encode(text), np.array(self._beginning, dtype=np.int32)
        return ids if np.array_equal(ids[: len(first)], first) else np.concatenate([first, ids])

    def decode(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """The text of `ids`: special tokens, and ids with which a model pads its vocabulary, stand for nothing.

        Bytes that are no valid UTF-8 become U+FFFD, and no white space is tidied.

        Raises:
            ValueError: a negative id.
        """
        if (ids < 0).any():
            raise ValueError(f"token {int(ids[ids < 0][0])} is negative; ids count from 0")
        with self._library("cannot decode these ids with"):
            return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes that a token adds to a text, which may be a part of a character; a special token adds none.

        None: the id is outside the vocabulary, or the decoder of tokenizer.json is one whose tokens depend on their neighbours.
        """
        text = self._tokenizer.id_to_token(token) if 0 <= token <= _LARGEST_ID else None
        if text is None:
            return None
        return b"" if token in self._special_ids else bytes_of_token(text, self._decoder)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return frozenset(number for number, token in added if token.special)

    @contextmanager
    def _library(self, deed: str) -> Iterator[None]:
        """Turns the library's errors into a ValueError that names the file.

        It raises plain Exceptions; where its Rust panics it is a PanicException, which is none of them.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(
                f"{self._place}/{_TOKENIZER} {deed} the library tokenizers {tokenizers.__version__}: {error}"
            ) from error

    def _named_ids(
        self, generation: Mapping[str, Any], model: Mapping[str, Any]
    ) -> Mapping[str, int | list[int]]:
        found: dict[str, int | list[int]] = {}
        for config in (generation, model):  # config.json last: the names are of its own
            for key, value in config.items():
                ids = value if isinstance(value, list) else [value]
                named = key.endswith("_token_id") and key not in _OWN_IDS and bool(ids)
                if named and all(type(number) is int and 0 <= number <= _LARGEST_ID for number in ids):
                    found[key] = value
        beginning = self._tokenizer.token_to_id(self._special_tokens.get("bos_token", ""))
        return found if beginning is None else {"bos_token_id": beginning, **found}

    def _end_tokens(self, generation: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[int, ...]:
        own = [self._id_of("eos_token")] if "eos_token" in self._special_tokens else []
        found = (*own, *_ids(generation, "eos_token_id"), *_ids(model, "eos_token_id"))
        if wrong := [number for number in found if not 0 <= number <= _LARGEST_ID]:
            raise ValueError(f"{self._place} names the end token {wrong[0]}; ids are from 0 to {_LARGEST_ID}")
        if not found:
            raise ValueError(
                f"{self._place} names no end token, so no response would end; add eos_token to {_CONFIG}, or eos_token_id "
                f"to {_GENERATION}"
            )
        return tuple(dict.fromkeys(found))

    def _padding(self, generation: Mapping[str, Any], model: Mapping[str, Any]) -> int:
        own = [self._id_of("pad_token")] if "pad_token" in self._special_tokens else []
        named = (*own, *_ids(generation, "pad_token_id"), *_ids(model, "pad_token_id"))
        return next((i for i in named if 0 <= i <= _LARGEST_ID), self.eos_id)

    def _text_beginning(self) -> tuple[int, ...]:
        with self._library("cannot encode this text with"):
            probe = self._tokenizer.encode("a", add_special_tokens=True)
        added = probe.special_tokens_mask
        # What a post-processor puts behind the text would end the prompt; only what stands before it is taken.
        found = tuple(probe.ids[: added.index(0) if 0 in added else 0])
        if any(number >= self._vocab_size for number in found):
            raise ValueError(
                f"{self._place}/{_TOKENIZER} begins a text with the ids {found}, not all of which are in its vocabulary of "
                f"{self._vocab_size}"
            )
        return found

    def _template(self, config: Any) -> ChatTemplate | None:
        if _TEMPLATE in self.files:
            try:
                return self._named_template(self.files[_TEMPLATE].decode("utf-8"), _TEMPLATE)
            except UnicodeDecodeError as error:
                raise ValueError(f"{self._place}/{_TEMPLATE} is not UTF-8: {error}") from error
        if isinstance(config, list):
            named = {each.get("name"): each.get("template") for each in config if isinstance(each, Mapping)}
            config = named.get("default")
        return self._named_template(config, f"{_CONFIG}: chat_template") if isinstance(config, str) else None

    def _named_template(self, source: str, name: str) -> ChatTemplate:
        return ChatTemplate(source, name=f"{self._place}/{name}", special_tokens=self._special_tokens)

    def _id_of(self, name: str) -> int:
        token = self._special_tokens[name]
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(
                f"{self._place}/{_CONFIG}: {name} {token!r} is not in the vocabulary of {_TOKENIZER}; the two files must "
                "be of one tokenizer"
            )
        return found

    def _json(self, name: str) -> Mapping[str, Any]:
        return read_object(self.files[name], f"{self._place}/{name}") if name in self.files else {}


def _check_normalizer(normalizer: Any, where: str) -> None:
    """Refuses SentencePiece's precompiled tables that are not as long as they say: the library would end the process.

    Raises:
        ValueError: there is one.
    """
    left = [normalizer]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, Mapping):
            left += [value for value in one.values() if isinstance(value, list | Mapping)]
            if one.get("type") == "Precompiled":
                _check_table(one.get("precompiled_charsmap"), where)


def _check_table(encoded: Any, where: str) -> None:
    """A table is the length of its first part in 4 bytes, that part in units of 4 bytes, and a text."""
    try:
        table = base64.b64decode(encoded or "", validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: precompiled_charsmap is not base64: {error}") from error
    said = int.from_bytes(table[:4], "little")
    if table and (said % 4 or said > len(table) - 4):
        raise ValueError(
            f"{where}: precompiled_charsmap says that its first part has {said} bytes; there are {max(len(table) - 4, 0)}"
        )


def _content(value: Any) -> str | None:
    """A special token's text, which older files wrap into an object."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    """One id, several, or none."""
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        raise ValueError(f"{key} must be a number or a list of numbers; got {value!r}")
    return values
