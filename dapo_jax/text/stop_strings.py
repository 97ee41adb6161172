"""Where a response ends besides its end token: further ids, and strings that its text must not go beyond."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from dapo_jax.text.tokenizers import Tokenizer

_ALIGNMENTS = 4
"""A UTF-8 character has at most this many bytes, so one of as many neighbouring bytes begins a character."""


class StopStrings:
    """Finds the token with which a response's text first holds one of some strings.

    A string is complete at token n if the text of the first n tokens holds it. The sampled tokens up to and including
    that one are kept, and trained on; `decode`, which graders see, gives the text before the string, as vLLM does.

    Only the last tokens are looked at. A token that has a text has a byte or more, so a string of B bytes that ends
    in token n begins in the last B such tokens. Four more make up for what decoders do at the edge of a text: some drop
    its first space, some give up a run of bytes whose first character is cut in two. Tokens without a text, special ones
    for instance, are passed over. What is found at token n thus depends on the tokens before it alone, and not on
    how many of them came in one call.

    >>> from dapo_jax.text.tokenizers import ByteTokenizer
    >>> stop = StopStrings(ByteTokenizer(), ["END"])
    >>> tokens = ByteTokenizer().encode("7 END.")
    >>> stop.find(tokens, 0), stop.find(tokens[:4], 0), stop.decode(tokens)
    (5, None, '7 ')
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        """Keeps the strings; none of them: nothing is ever found.

        Raises:
            ValueError: an empty string, or one with U+FFFD, which stands for bytes that are no text.
        """
        for string in strings:
            if not string:
                raise ValueError(
                    "a stop string is empty: every response would end before it began; remove it"
                )
            if "\ufffd" in string:
                raise ValueError(
                    f"stop string {string!r} holds U+FFFD, which stands for bytes that are no text yet"
                )
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max((len(string.encode("utf-8")) for string in strings), default=0) + _ALIGNMENTS
        self._has_text: dict[int, bool] = {}

    def find(self, token_ids: Int[np.ndarray, " tokens"], start: int) -> int | None:
        """The number of tokens up to and including the first that completes a string; None if none does.

        Args:
            token_ids: the response so far.
            start: how many of its tokens are known to complete nothing: those of earlier calls.

        Raises:
            ValueError: `start` is not a number of tokens of the response.
        """
        if not 0 <= start <= len(token_ids):
            raise ValueError(f"start={start} is not within the response's {len(token_ids)} tokens")
        if not self._strings or start == len(token_ids):
            return None
        tail, places = self._tail(token_ids, start)
        text = self._tokenizer.decode(tail)
        # Decoding more bytes changes what earlier ones meant only where it gives U+FFFD: without it the whole text
        # holds whatever the text after any of its tokens held.
        if "\ufffd" not in text and not self._holds(text):
            return None
        fresh = (end for end, place in enumerate(places, start=1) if place >= start)
        return next((places[end - 1] + 1 for end in fresh if self._completes(tail, end)), None)

    def decode(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """The text of `ids` before the earliest stop string; all of it if there is none."""
        text = self._tokenizer.decode(ids)
        return text[: min((place for s in self._strings if (place := text.find(s)) >= 0), default=len(text))]

    def _tail(
        self, token_ids: Int[np.ndarray, " tokens"], start: int
    ) -> tuple[Int[np.ndarray, " tail"], list[int]]:
        """The new tokens that have a text and as many before them as a window needs, with their places."""
        places = [place for place in range(start, len(token_ids)) if self._text_in(int(token_ids[place]))]
        before: list[int] = []
        place = start
        while place > 0 and len(before) < self._window + _ALIGNMENTS:
            place -= 1
            if self._text_in(int(token_ids[place])):
                before.append(place)
        places = before[::-1] + places
        return token_ids[places], places

    def _completes(self, tail: Int[np.ndarray, " tail"], end: int) -> bool:
        """True if a string ends within the window before `end`, at whichever alignment it is decoded."""
        begin = max(0, end - self._window)
        starts = range(begin, max(begin - _ALIGNMENTS, -1), -1)
        return any(self._holds(self._tokenizer.decode(tail[at:end])) for at in starts)

    def _holds(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _text_in(self, token: int) -> bool:
        """True if the token stands for text. Twice in a row, because decoders may drop the first space of a text."""
        if token not in self._has_text:
            self._has_text[token] = bool(self._tokenizer.decode(np.array([token, token], np.int32)))
        return self._has_text[token]


def stop_ids(tokenizer: Tokenizer, extra: Sequence[int]) -> tuple[int, ...]:
    """All ids that end a response: the tokenizer's own, `eos_id` first, then `extra`; each once.

    Raises:
        ValueError: an id that the tokenizer does not have.
    """
    outside = [token for token in extra if not 0 <= token < tokenizer.vocab_size]
    if outside:
        raise ValueError(
            f"sampling.stop_token_ids: {outside[0]} is not in the tokenizer's vocabulary of {tokenizer.vocab_size} ids, "
            f"0 to {tokenizer.vocab_size - 1}"
        )
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *extra)))
