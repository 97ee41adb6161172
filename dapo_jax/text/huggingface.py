"""Loads tokenizers of pretrained models from Hugging Face folders with the `tokenizers` library. Code in a folder is not executed.

Rules for settings that are ambiguous or differ between files:

* The end token is `eos_token` from tokenizer_config.json. All other end tokens in generation_config.json and config.json end a response too.
* A plain-text prompt begins with the beginning-of-text token if tokenizer.json's post-processor adds this token, as in Llama 3.
  As in transformers 5, `add_bos_token` in tokenizer_config.json is ignored. The token is never added twice.
* As in transformers, entries of `added_tokens_decoder` in tokenizer_config.json replace entries of tokenizer.json. Without this key, added_tokens.json
  adds tokens. Tokens that the configuration names, such as `eos_token`, are special tokens. If they are new, they have the next ids.
* Special tokens that are spelled out in a text are encoded as special tokens, because chat templates output them as text.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from itertools import count
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from dapo_jax.storage import files_of, path_of, write_whole
from dapo_jax.text.chat import ChatTemplate
from dapo_jax.text.plain_json import read_object
from dapo_jax.text.special_tokens import FIRST_GUARD, Before, Guards
from dapo_jax.text.thoughts import marks_in

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json",
    "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
"""The files from which a tokenizer is loaded, and which are saved unchanged. The model's config.json is read too, but not saved."""

_TOKENIZER, _CONFIG, _GENERATION, _TEMPLATE, _SPECIAL_TOKENS, _TOOL_USE = TOKENIZER_FILES
_ADDED = "added_tokens.json"
"""A file of older folders, which is read and saved too. It is not in `TOKENIZER_FILES`, because the checkpoints of earlier versions have no digest of it."""
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The order in which transformers adds these tokens."""
_OWN_IDS = ("eos_token_id", "pad_token_id")
"""Keys that `token_ids` omits, because `stop_ids` and `pad_id` store these ids."""
_MISTRAL = ("mistral", "mistral3", "ministral", "pixtral", "voxtral")
"""Values of model_type for which transformers 5 warns of older folders, whose texts are not split between small and capital letters."""
_WRONG_SPLIT = "splits texts with an expression that is not Mistral's, so some texts become other tokens: mend the folder with transformers, AutoTokenizer.from_pretrained(FOLDER, fix_mistral_regex=True).save_pretrained(FOLDER)"
_LARGEST_ID = 2**31 - 1
"""The largest valid id, since ids are signed 32-bit integers."""
_ORDINARY = chr(ord(FIRST_GUARD) - 1)
"""A character that represents ordinary text before a text to encode. Texts hardly contain it, so vocabularies do not merge it with others."""


class HuggingFaceTokenizer:
    """A tokenizer from a model folder, with the end tokens and the chat template that the folder specifies."""

    def __init__(
        self, files: Mapping[str, bytes], *, model: Mapping[str, Any] | None = None, place: str = "the folder"
    ) -> None:
        """Parses the contents of `TOKENIZER_FILES`, and special tokens in `model`, the model's config.json. `place` is the folder's name in errors.

        Raises ValueError if a file cannot be parsed, a special token is not in the vocabulary, or no file defines an end token.
        """
        self.files = {name: files[name] for name in (*TOKENIZER_FILES, _ADDED) if name in files}
        self._place = place
        described = self._json(_TOKENIZER)
        self._decoder = described.get("decoder") or {}
        config = {**self._json(_SPECIAL_TOKENS), **self._json(_CONFIG)}
        generation, model = self._json(_GENERATION), model or {}
        named = {key: _text(config.get(key)) for key in (*_ROLES, *config) if key.endswith("_token")}
        self._special_tokens = {key: text for key, text in named.items() if text}
        self.chat_template = self._template(config.get("chat_template"))
        """The folder's chat template, or None. Of several templates, `default` is used, and `tool_use` with tools."""
        # Gemma 3's small models define a token for images, but have no embedding for it. If nothing needs it, its text is ordinary text.
        needed = [self._special_tokens.get(f"{key}_token") for key in ("bos", "eos", "pad")]
        needed += [described.get("post_processor"), self.chat_template and self.chat_template.source]
        needed_text = str(needed)
        rows = model.get("vocab_size") or _LARGEST_ID
        with self._library("cannot be loaded by"):
            content, added = self.files[_TOKENIZER].decode("utf-8"), self._added_tokens(described, config)
            kept = [t for t in added if t["id"] < rows or not t["special"] or t["content"] in needed_text]
            marks = marks_in([t["content"] for t in added])
            self._kept = kept = [{**t, "special": False} if t["content"] in marks else t for t in kept]
            if kept != described.get("added_tokens", []):
                content = json.dumps({**described, "added_tokens": kept})
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            raise ValueError(
                f"{place}/{_TOKENIZER}: its dropout is {dropout}, so tokenization would be random; set it to null in this file"
            )
        if config.get("split_special_tokens"):
            raise ValueError(
                f"{place}/{_CONFIG}: split_special_tokens encodes the special tokens of a text as characters, so a chat template could not "
                "write them; set it to false in this file"
            )
        # A tokenizer.json from a training script may enable truncation or padding, which would change prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        """The largest token id plus one. Models often have more embedding rows; see `check_vocabulary`."""
        split, version = described.get("pre_tokenizer"), str(model.get("transformers_version") or 4)
        old = model.get("model_type") in _MISTRAL and self.vocab_size > 100_000 and version < "5"
        if old and split and "p{Lu}" not in str(split):
            warnings.warn(f"{place}/{_TOKENIZER} {_WRONG_SPLIT}", stacklevel=2)
        self.token_ids = self._named_ids(generation, model)
        """Ids of special tokens other than end and padding tokens, by their keys in config.json, such as `bos_token_id`."""
        self.stop_ids = self._end_tokens(generation, model)
        """Ids of all end tokens that the folder's files define, with `eos_id` first."""
        self.eos_id = self.stop_ids[0]
        """Id of the token that ends a plain text. `stop_strings.turn_end` ends an answer in a conversation."""
        padding = self._ids_of("pad", generation, model)
        self.pad_id = next((token for token in padding if 0 <= token <= _LARGEST_ID), self.eos_id)
        """Id of the padding token, or of the end token if the folder does not define a padding token."""
        self._beginning = list[int]()
        if self._tokenizer.num_special_tokens_to_add(is_pair=False):
            with self._library("cannot encode this text with"):
                probe = self._tokenizer.encode("a", add_special_tokens=True)
            # Only tokens before the text are added to prompts. Tokens that the post-processor adds after the text would end the prompt.
            mask = probe.special_tokens_mask
            self._beginning = probe.ids[: mask.index(0) if 0 in mask else 0]
        added = self._tokenizer.get_added_tokens_decoder()
        # Added tokens of white space, as in Gemma, are ordinary text.
        self._added = {
            number: token.content for number, token in added.items() if token.content.strip(" \n\t▁")
        }
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        """The ids that `decode` omits, by the texts of their tokens."""
        self.marks = {number for number, text in self._added.items() if text in marks}
        """The ids of tokens that mark thoughts."""
        template = self.chat_template or ChatTemplate("", name="none")
        control = (*self.special_tokens, *marks)
        written = template.source + template.with_tools.source
        # Other added tokens are ordinary text, such as Gemma's `<table>`.
        self._control = {n: text for n, text in self._added.items() if text in control or text in written}
        self._guards = Guards(self._control.values())
        self.guarded = self._guards.guarded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HuggingFaceTokenizer) and self.files[_TOKENIZER] == other.files[_TOKENIZER]

    __hash__ = None

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], base: str | os.PathLike[str] | None = None
    ) -> "HuggingFaceTokenizer":
        """Loads a tokenizer from a folder, which must contain a tokenizer.json. `base` is the model folder, if it is another one: files about the model are read
        there, unless `folder` has them. Raises OSError, and the errors of the constructor."""
        path = path_of(folder)
        files = files_of(path, (*TOKENIZER_FILES, _ADDED, "config.json"))
        if base is not None:
            files = files_of(path_of(base), (_GENERATION, "config.json")) | files
        model = read_object(files.get("config.json", b"{}"), path / "config.json")
        model = {**(model.get("text_config") or {}), **model}  # of a model for images and text
        return cls(files, model=model, place=str(path))

    def save(self, folder: str | os.PathLike[str], ends: Sequence[int] = ()) -> None:
        """Writes the tokenizer's files unchanged, except that generation_config.json contains all `ends` (`stop_strings.stop_ids`)."""
        path = path_of(folder)
        more = set(ends) - set(self.stop_ids)
        ids = {**self.token_ids, "pad_token_id": self.pad_id, **self._json(_GENERATION)}
        ids["eos_token_id"] = [*self.stop_ids, *more]
        generation = {_GENERATION: (json.dumps(ids, indent=2) + "\n").encode()}
        files = self.files | generation if more else generation | self.files
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(path / name, content)

    def encode(self, text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """See `Tokenizer.encode`. Special tokens that are spelled out in the text are encoded. A lone surrogate raises ValueError."""
        return self._ids(self._tokenizer, self._before(after), text)

    def encode_plain(self, text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """See `Tokenizer.encode_plain`. Added tokens that the chat template contains, such as `<tool_call>`, are encoded as characters too."""
        return self.encode_guarded(self.guarded(text), after)

    def encode_guarded(self, text: str, after: Before = None) -> Int32[np.ndarray, " tokens"]:
        """See `Tokenizer.encode_guarded`. The whole text is encoded at once, because tokenizers add spaces at certain places of a text."""
        before, plain = self._before(after), self._guards.restored(text)
        encoding, guarded = self._encoding(self._tokenizer, before, plain), before + text
        for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._control.get(number) not in (None, guarded[begin:end].strip()):  # not the template's
                return self._ids(self._guarding, before, text)
        return self._ids(self._tokenizer, before, plain)

    @cached_property
    def _guarding(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that finds the added tokens first and restores guards afterwards."""
        described = {**self._json(_TOKENIZER), "post_processor": None, "truncation": None, "padding": None}
        steps = [described["normalizer"]] if described.get("normalizer") else []
        for guard, first in self._guards.firsts.items():
            steps.insert(0, {"type": "Replace", "pattern": {"String": chr(guard)}, "content": chr(first)})
        added = [{**token, "normalized": False} for token in self._kept]
        described |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "added_tokens": added}
        with self._library("with guards cannot be loaded by"):
            return tokenizers.Tokenizer.from_str(json.dumps(described))

    def _before(self, after: Before) -> str:
        """Returns a text with the effect of the tokens `after` on the text that follows: a special token, or any ordinary text."""
        return "" if after is None else self._added.get(int(after[-1]) if len(after) else -1, self._ordinary)

    @cached_property
    def _ordinary(self) -> str:
        """Returns a text that represents ordinary text, or an empty string if the vocabulary is an alphabet without such a character."""
        with suppress(ValueError):
            return _ORDINARY if self._encoding(self._tokenizer, "", _ORDINARY) else ""
        return ""

    def _ids(self, library: tokenizers.Tokenizer, before: str, text: str) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of `text` after `before`. If a token would span ordinary text and `text`, `text` is encoded alone."""
        encoding, start = self._encoding(library, before, text), len(before)
        if before == _ORDINARY and any(begin < start < end for begin, end in encoding.offsets):
            encoding, start = self._encoding(library, "", text), 0
        first = next((at for at, (begin, _) in enumerate(encoding.offsets) if begin >= start), len(encoding))
        return np.array(encoding.ids[first:], dtype=np.int32)

    def _encoding(self, library: tokenizers.Tokenizer, before: str, text: str) -> tokenizers.Encoding:
        text.encode("utf-8")  # raises an error with the position of a lone surrogate
        try:
            with self._library("cannot encode this text with"):
                return library.encode(before + text, add_special_tokens=False)
        except ValueError as error:
            text = self._guards.restored(text)
            missing = [at for at, char in enumerate(text) if library.token_to_id(char) is None]
            if "[UNK]" not in str(error) or not missing:
                raise
            where = f"character {text[missing[0]]!r} at position {missing[0]} of {text!r:.80}"
            raise ValueError(f"{where} is not in the vocabulary of {self._place}; remove it") from error

    def encode_prompt(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Returns the ids of a plain-text prompt, preceded by the beginning-of-text token if the model has one."""
        ids, first = self.encode(text), np.array(self._beginning, dtype=np.int32)
        return ids if np.array_equal(ids[: len(first)], first) else np.concatenate([first, ids])

    def decode(self, ids: Int[np.ndarray, " tokens"], after: Before = None) -> str:
        """Returns the text of `ids`. Special tokens, except marks of thoughts, and ids that only pad the model's vocabulary, have no text.

        Bytes that are not valid UTF-8 become U+FFFD. Some decoders, such as Llama 2's, drop the first space of a text. They keep
        it if ordinary text comes before `ids`, so `decode(encode(text, after), after)` is `text`.
        """
        last = [] if after is None else [int(token) for token in after[-1:] if int(token) not in self._added]
        with self._library("cannot decode these ids with"):
            decode = partial(self._tokenizer.decode, skip_special_tokens=True)
            text = decode(ids.tolist())
            first = ids[:8].tolist()  # they decide, and decoding a long text twice would take time
            is_dropped = bool(last) and decode([*last, *first]) == f"{decode(last)} {decode(first)}"
        return f" {text}" if is_dropped else text

    def marked_text(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """Returns the text of `ids` with the special tokens, except those at the end."""
        ends = (at for at in range(len(ids), 0, -1) if int(ids[at - 1]) not in self.special_tokens.values())
        return self.spelled(ids[: next(ends, 0)])

    def spelled(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """Returns the text of `ids`, in which special tokens have their names, such as `<|im_end|>`."""
        with self._library("cannot decode these ids with"):
            return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes | None:
        """See `dapo_jax.text.tokenizers.token_bytes`."""
        text = self._tokenizer.id_to_token(token) if 0 <= token <= _LARGEST_ID else None
        if text is None:
            return None
        return b"" if self._added.get(token) in self.special_tokens else bytes_of_token(text, self._decoder)

    @contextmanager
    def _library(self, deed: str) -> Iterator[None]:
        """Converts the library's errors to a ValueError that names the file.

        A panic in the library's Rust code raises a PanicException, which is not a subclass of Exception.
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
        named: dict[str, int | list[int]] = {}
        for key, value in (*generation.items(), *model.items()):  # config.json takes precedence
            ids = value if isinstance(value, list) else [value]
            valid = ids and all(type(number) is int and 0 <= number <= _LARGEST_ID for number in ids)
            if valid and key.endswith("_token_id") and key not in _OWN_IDS:
                named[key] = value
        beginning = self._tokenizer.token_to_id(self._special_tokens.get("bos_token", ""))
        return named if beginning is None else {"bos_token_id": beginning, **named}

    def _end_tokens(self, generation: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[int, ...]:
        ids = self._ids_of("eos", generation, model)
        if wrong := [number for number in ids if not 0 <= number <= _LARGEST_ID]:
            raise ValueError(f"{self._place} has the end token id {wrong[0]}; ids are 0 to {_LARGEST_ID}")
        if not ids:
            remedy = f"add eos_token to {_CONFIG}, or eos_token_id to {_GENERATION}"
            raise ValueError(
                f"{self._place} does not define an end token, so no response would end; {remedy}"
            )
        return tuple(dict.fromkeys(ids))

    def _ids_of(self, name: str, *configs: Mapping[str, Any]) -> list[int]:
        """Returns the ids that the files define for `eos` or `pad`, with the tokenizer's own id first."""
        token, ids = self._special_tokens.get(f"{name}_token"), list[int]()
        if token is not None:
            number = self._tokenizer.token_to_id(token)
            if number is None:
                raise ValueError(
                    f"{self._place}/{_CONFIG}: {name}_token {token!r} is not in the vocabulary of {_TOKENIZER}; both files must "
                    "belong to the same tokenizer"
                )
            ids.append(number)
        for value in (config.get(f"{name}_token_id") for config in configs):
            ids += value if isinstance(value, list) else [] if value is None else [value]
        return ids

    def _added_tokens(self, described: Mapping[str, Any], config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the added tokens of tokenizer.json, tokenizer_config.json and added_tokens.json, by ascending ids."""
        added = {token["content"]: token for token in described.get("added_tokens") or []}
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        named, listed = [*self._special_tokens.values()], list[str]()
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = config.get(key) or []
            if isinstance(value, Mapping):
                named += map(_text, value.values())
            else:
                listed += map(_text, value)
        older = self._json(_ADDED) if "added_tokens_decoder" not in config else {}
        for text, number in older.items():
            special = text in (*named, *listed)
            flags = {**plain, "normalized": not special, "special": special}
            added.setdefault(text, {"id": number, "content": text, **flags})
        for number, token in (config.get("added_tokens_decoder") or {}).items():
            known = added.get(text := token["content"], {})
            special = known.get("special") or token.get("special", False)
            added[text] = {**plain, "id": int(number), **known, **token, "special": special}
        ids = described["model"].get("vocab") or {}
        if isinstance(ids, list):  # of a Unigram model
            ids = {piece: number for number, (piece, _) in enumerate(ids)}
        new = count(1 + max([*ids.values(), *(token["id"] for token in added.values())], default=-1))
        ends = [self._special_tokens.get(f"{name}_token") for name in ("eos", "pad")]
        for text in filter(None, (*named, *(text for text in listed if text not in added))):
            is_new = text not in added and text not in ids
            if not is_new or text not in ends:  # `_ids_of` refuses new ones of `ends`
                number = next(new) if is_new else ids.get(text)
                added[text] = {**plain, "id": number, "content": text, **added.get(text, {}), "special": True}
        return sorted(added.values(), key=lambda token: token["id"])

    def _template(self, config: Any) -> ChatTemplate | None:
        name, content = f"{self._place}/{_CONFIG}: chat_template", self.files.get(_TEMPLATE)
        if content is not None:
            name, config = f"{self._place}/{_TEMPLATE}", content
        if isinstance(config, list):
            config = {item.get("name"): item.get("template") for item in config if isinstance(item, Mapping)}
        sources = config if isinstance(config, Mapping) else {"default": config}
        templates = {
            key: ChatTemplate(source, name=name, special_tokens=self._special_tokens)
            for key, source in sources.items() if isinstance(source, str | bytes)
        }  # fmt: skip
        if (tools := self.files.get(_TOOL_USE)) is not None:
            where = f"{self._place}/{_TOOL_USE}"
            templates["tool_use"] = ChatTemplate(tools, name=where, special_tokens=self._special_tokens)
        if (template := templates.get("default")) is not None:
            template.with_tools = templates.get("tool_use", template)
        return template

    def _json(self, name: str) -> Mapping[str, Any]:
        return read_object(self.files[name], f"{self._place}/{name}") if name in self.files else {}


def _text(value: Any) -> str:
    """Returns the text of a special token in a configuration: a string, or in older files an object."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


class _Untrained(HuggingFaceTokenizer):
    """A tokenizer that needs no training. Its tokens have the ids 2, 3, ..., after the padding token (0) and the end token (1)."""

    def __init__(self, name: str, tokens: str, **parts: Mapping[str, Any]) -> None:
        """Writes the files that transformers loads too. `tokens` are single characters, and `parts` the other parts of tokenizer.json."""
        # The first character of the special tokens is no token, so that no text of an alphabet can spell them out.
        mark = next(char for char in map(chr, count(ord("["))) if char not in tokens)
        special = (f"{mark}PAD]", f"{mark}END]")
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
        added = [{"id": number, "content": text, **flags} for number, text in enumerate(special)]
        vocabulary = {text: number for number, text in enumerate([*special, *tokens])}
        described = {**parts, "added_tokens": added, "model": {**parts["model"], "vocab": vocabulary}}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {"pad_token": special[0], "eos_token": special[1]}
        files = {
            _TOKENIZER: json.dumps(described, ensure_ascii=False) + "\n",
            _CONFIG: json.dumps(config) + "\n",
        }
        super().__init__({file: text.encode() for file, text in files.items()}, place=name)


class ByteTokenizer(_Untrained):
    """Uses one token per UTF-8 byte, so it encodes any text. Bytes that are not valid UTF-8 are decoded to U+FFFD.

    >>> ByteTokenizer().encode("A=").tolist()
    [67, 63]
    """

    def __init__(self) -> None:
        """Names the bytes by the characters of byte-level vocabularies."""
        pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        parts = {"pre_tokenizer": pieces, "decoder": pieces, "model": {"type": "BPE", "merges": []}}
        super().__init__("byte", "".join(_byte_level()), **parts)


class CharTokenizer(_Untrained):
    """Uses one token per character of a fixed alphabet, in the alphabet's order.

    >>> CharTokenizer("0123456789+=").encode("1+2").tolist()
    [3, 12, 4]

    Raises:
        ValueError: the alphabet is empty or repeats a character.
    """

    def __init__(self, alphabet: str) -> None:
        """Checks the alphabet. There is no token [UNK], so the encoding methods refuse other characters."""
        repeated = sorted({char for char in alphabet if alphabet.count(char) > 1})
        if repeated or not alphabet:
            problem = f"repeats {repeated}" if repeated else "is empty"
            raise ValueError(
                f"alphabet {alphabet!r} {problem}; give every character of prompts and responses once"
            )
        self.alphabet = alphabet
        pieces = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        model = {"type": "WordLevel", "unk_token": "[UNK]"}
        parts = {"pre_tokenizer": pieces, "decoder": {"type": "Fuse"}, "model": model}
        super().__init__(f"char:{alphabet}", alphabet, **parts)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Matches a token that represents a single byte in a vocabulary with byte fallback."""


def bytes_of_token(token: str, decoder: Mapping[str, Any]) -> bytes | None:
    """Returns the bytes that a token adds to a text, or None if they depend on the tokens around it.

    The `tokenizers` library can decode only to text, in which an incomplete character becomes U+FFFD. The returned bytes include
    a leading space of the token, even if the decoder strips this space at the beginning of a text. `token` is written as in the
    vocabulary, and `decoder` is its value in tokenizer.json, or an empty mapping.

    >>> bytes_of_token("\u0120\u00e6", {"type": "ByteLevel"})
    b' \\xe6'
    """
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    text, joined = token, False
    for step in steps:
        kind = step.get("type")
        joined = joined or kind in ("Fuse", "Metaspace")
        if kind == "ByteLevel":
            known = _byte_level()
            # A token with any other character, for example an added token, represents its own text.
            return bytes(known[char] for char in text) if known.keys() >= set(text) else text.encode("utf-8")
        if kind == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if kind == "Replace" and (pattern := step["pattern"].get("String")):
            text = text.replace(pattern, step["content"])
        elif kind == "Metaspace":
            text = text.replace(step["replacement"], " ")
        elif kind not in ("Fuse", "ByteFallback") and not (kind == "Strip" and joined):
            return None
    # If no decoder step joins tokens, the decoder separates them with spaces, which belong to no token.
    return text.encode("utf-8") if joined else None


@cache
def _byte_level() -> Mapping[str, int]:
    """Maps each character of byte-level vocabularies to its byte, in the order of the bytes. Printable bytes map to themselves; the other bytes use characters from U+0100 on."""
    printable, others = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}, count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
