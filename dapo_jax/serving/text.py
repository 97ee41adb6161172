"""Decodes responses to text incrementally, as their tokens arrive."""

from collections.abc import Sequence

import numpy as np

from dapo_jax.text.special_tokens import Before
from dapo_jax.text.stop_strings import StopStrings
from dapo_jax.text.tokenizers import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The character that decoders output in place of bytes that are not, or not yet, a complete character."""


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of `ids`. Skips ids outside the tokenizer's vocabulary, which a model with padded embeddings may sample."""
    return StopStrings(tokenizer, ()).text(ids)


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of a token inside a text, which keeps a first space. Decodes the token after itself."""
    return StopStrings(tokenizer, ()).text([token], np.array([token]))


class GrowingText:
    """The text of a response that arrives in blocks of tokens, up to its first stop string or stop id.

    A token may be part of a character, and some tokenizers decode a token differently at the start of a text. Therefore each block is decoded
    together with the previous block. Incomplete characters, and text that may be the beginning of a stop string, are held back. With byte fallback,
    one incomplete character makes all bytes next to it invalid.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), ids: Sequence[int] = (), *, after: Before = None
    ) -> None:
        """Prepares to decode tokens that follow the tokens `after`, or begin a text without `after`."""
        self._stop, self._after = StopStrings(tokenizer, stop, ids), after
        self._held = max(map(len, stop), default=1) - 1
        self._window: list[int] = []
        """Tokens to decode next: a few tokens that end with a complete character, and all tokens after them."""
        self._shown = 0
        """Number of characters in the window's text that have been moved to `_waiting`."""
        self._waiting, self._over = "", False
        self._first = 0
        """Number of characters at the beginning of `_waiting` in which `StopStrings.find` does not search: a first space that only `after` keeps."""

    def add(self, ids: list[int], *, last: bool = False) -> str:
        """Adds tokens, and returns the text that can now be shown. If `last` is set, returns all remaining text."""
        if self._over:
            return ""
        self._window += filter(self._stop.has_text, ids)
        text, known = self._stop.text(self._window, self._after), len(self._window)
        if self._after is not None and not self._shown:
            self._first = len(text) - len(self._stop.text(self._window))
        whole = text
        # An incomplete character has at most three bytes.
        while whole.endswith(_BROKEN) and not last and known > max(len(self._window) - 3, 0):
            known -= 1
            whole = self._stop.text(self._window[:known], self._after)
        is_known = not whole.endswith(_BROKEN)
        whole = whole if last else whole.rstrip(_BROKEN)
        self._waiting, self._shown = self._waiting + whole[self._shown :], max(self._shown, len(whole))
        if is_known:
            # One of these beginnings is not inside a character.
            for begin in range(known - 1, max(known - 5, -1), -1):
                end = self._stop.text(self._window[begin:known])
                if end and whole.endswith(end):
                    self._window, self._shown, self._after = self._window[begin:], len(end), None
                    break
        elif len(self._window) > 16:
            # Without this, the window would grow with each token that is not a character. The last tokens contain the incomplete character.
            for cut in (-4, -5, -6):  # one of these is between two characters
                start, end = (
                    self._stop.text(self._window[:cut], self._after),
                    self._stop.text(self._window[cut:]),
                )
                if end and start + end == text:
                    self._waiting, self._after = self._waiting + start[self._shown :], None
                    self._window, self._shown = self._window[cut:], max(self._shown - len(start), 0)
                    break
        starts = [at for string in self._stop.strings if (at := self._waiting.find(string, self._first)) >= 0]
        self._over = bool(starts)
        end = min(starts, default=len(self._waiting) if last else max(len(self._waiting) - self._held, 0))
        new, self._waiting = self._waiting[:end], self._waiting[end:]
        self._first = 0 if new else self._first
        return self._stop.unmarked(new)
