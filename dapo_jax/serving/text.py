"""Text that grows token by token."""

from collections.abc import Sequence

import numpy as np

from dapo_jax.text.tokenizers import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of bytes that are not a whole character, or not yet."""


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of `ids`, without ids outside the tokenizer's vocabulary; a model may have such spare ids."""
    known = [token for token in ids if 0 <= token < tokenizer.vocab_size]
    return tokenizer.decode(np.array(known, np.int32))


class GrowingText:
    """The text of a response that arrives in blocks of tokens, up to its first stop string.

    A token may be a part of a character, and some tokenizers decode a token differently at the start of a text. So each block is decoded
    together with the block before it. An unfinished character, and text that may begin a stop string, are held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._held = max((len(each) for each in stop), default=1) - 1
        self._window: list[int] = []
        """The last block that ended with a whole character, and all tokens after it."""
        self._shown = 0
        """Number of characters of the window's text that are complete."""
        self._waiting, self._over = "", False

    def add(self, ids: list[int], *, last: bool = False) -> str:
        """Returns the text that these tokens complete; with the `last` tokens, all the rest."""
        if self._over:
            return ""
        self._window += ids
        text = decoded(self._tokenizer, self._window)
        # Any number of bytes that begin a character decode to one replacement character.
        whole = text if last else text.removesuffix(_BROKEN)
        self._waiting, self._shown = self._waiting + whole[self._shown :], len(whole)
        if ids and whole == text:
            self._window, self._shown = list(ids), len(decoded(self._tokenizer, ids))
        places = [place for each in self._stop if (place := self._waiting.find(each)) >= 0]
        self._over = bool(places)
        end = min(places, default=len(self._waiting) if last else max(len(self._waiting) - self._held, 0))
        new, self._waiting = self._waiting[:end], self._waiting[end:]
        return new
