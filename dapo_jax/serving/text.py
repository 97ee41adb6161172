"""Text that grows as tokens come. Imports no JetStream."""

import numpy as np

from dapo_jax.text.tokenizers import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Bytes decode to this that are no whole character, or not yet."""


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of `ids`; those that the tokenizer does not know are left out (a model may have spare ones)."""
    known = [token for token in ids if 0 <= token < tokenizer.vocab_size]
    return tokenizer.decode(np.array(known, np.int32))


class GrowingText:
    """The text of a response whose tokens come piece by piece.

    A token may be a part of a character, and some tokenizers decode a token differently where a text begins: each piece
    is decoded behind the one before it, and an unfinished character waits for the rest of it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """The tokens from the last piece on that ended in a whole character."""
        self._shown = 0
        """How many characters of the window's text are out."""

    def add(self, ids: list[int]) -> str:
        """The text that these tokens complete."""
        self._window += ids
        text = decoded(self._tokenizer, self._window)
        # Bytes that begin a character decode to one such character, whatever their number.
        whole = text.removesuffix(_BROKEN)
        new, self._shown = whole[self._shown :], len(whole)
        if ids and whole == text:
            self._window, self._shown = list(ids), len(decoded(self._tokenizer, ids))
        return new

    def rest(self) -> str:
        """The text that is left when the response has ended, whole or not."""
        return decoded(self._tokenizer, self._window)[self._shown :]
