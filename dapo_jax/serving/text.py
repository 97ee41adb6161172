"""Text that grows token by token."""

import numpy as np

from dapo_jax.text.tokenizers import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of bytes that are not a whole character, or not yet."""


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of `ids`, without ids outside the tokenizer's vocabulary; a model may have such spare ids."""
    known = [token for token in ids if 0 <= token < tokenizer.vocab_size]
    return tokenizer.decode(np.array(known, np.int32))


class GrowingText:
    """The text of a response that arrives in blocks of tokens.

    A token may be a part of a character, and some tokenizers decode a token differently at the start of a text. So each block is decoded
    together with the block before it, and an unfinished character is held back until it is complete.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """The last block that ended with a whole character, and all tokens after it."""
        self._shown = 0
        """Number of characters of the window's text that were returned."""

    def add(self, ids: list[int]) -> str:
        """Returns the text that these tokens complete."""
        self._window += ids
        text = decoded(self._tokenizer, self._window)
        # Any number of bytes that begin a character decode to one replacement character.
        whole = text.removesuffix(_BROKEN)
        new, self._shown = whole[self._shown :], len(whole)
        if ids and whole == text:
            self._window, self._shown = list(ids), len(decoded(self._tokenizer, ids))
        return new

    def rest(self) -> str:
        """Returns the remaining text once the response has ended, including an unfinished character."""
        return decoded(self._tokenizer, self._window)[self._shown :]
