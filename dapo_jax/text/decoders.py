"""The bytes of a single token, by the decoder that a tokenizer.json names.

The library `tokenizers` decodes to texts alone: a token that is a part of a character comes out as U+FFFD.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How a vocabulary with byte fallback writes a byte that is no token otherwise."""


def bytes_of_token(token: str, decoder: Any) -> bytes | None:
    """Returns the bytes that a token of the vocabulary adds to a text; None: the decoder makes them depend on the tokens around it.

    A space that a decoder strips off the beginning of the whole text belongs to the token.

    Args:
        token: as the vocabulary has it.
        decoder: the part `decoder` of tokenizer.json.

    >>> bytes_of_token("\u0120\u00e6", {"type": "ByteLevel"})
    b' \\xe6'
    """
    steps = decoder.get("decoders", []) if _kind(decoder) == "Sequence" else [decoder]
    text, joined = token, False
    for step in steps:
        kind = _kind(step)
        joined = joined or kind in ("Fuse", "Metaspace")
        if kind == "ByteLevel":
            known = _byte_level()
            # The library takes a token with any other character, such as one that was added, for its own text.
            return bytes(known[char] for char in text) if known.keys() >= set(text) else text.encode("utf-8")
        if kind == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if kind == "Replace" and (pattern := step["pattern"].get("String")):
            text = text.replace(pattern, step["content"])
        elif kind == "Metaspace":
            text = text.replace(step["replacement"], " ")
        elif kind not in ("Fuse", "ByteFallback") and not (kind == "Strip" and joined):
            return None
    # Tokens that no step joins have spaces between them.
    return text.encode("utf-8") if joined else None


def _kind(step: Any) -> str:
    return str(step.get("type")) if isinstance(step, Mapping) else ""


@cache
def _byte_level() -> Mapping[str, int]:
    """The byte of each character with which byte-level vocabularies write bytes: printable ones are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + place): byte for place, byte in enumerate(others)},
    }
