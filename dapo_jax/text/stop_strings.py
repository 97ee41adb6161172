"""Stop ids and stop strings, which end a response in addition to the model's end token."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from dapo_jax.text.tokenizers import Tokenizer

_ALIGNMENTS = 4
"""Maximum number of bytes in a UTF-8 character. Among this many consecutive bytes, at least one begins a character."""


class StopStrings:
    """Finds the first token at which the text of a response contains a stop string.

    A stop string is complete at token n if the text of the first n tokens contains it. Tokens up to and including token n
    are kept and trained on. As in vLLM, the text from `decode`, which graders receive, ends before the stop string.

    Only the most recent tokens are decoded. Every token with text has at least one byte, so a stop string of B bytes that ends in
    token n begins within the last B tokens with text. Four more tokens are decoded, because a decoder may drop the first space
    of a text, and the first token may begin inside a character. Tokens without text, such as special tokens, are skipped.
    The result does not depend on the number of new tokens per call to `find`.

    >>> from dapo_jax.text.tokenizers import ByteTokenizer
    >>> stop = StopStrings(ByteTokenizer(), ["END"])
    >>> tokens = ByteTokenizer().encode("7 END.")
    >>> stop.find(tokens, 0), stop.find(tokens[:4], 0), stop.decode(tokens)
    (5, None, '7 ')
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        """Stores the strings. Without strings, `find` always returns None.

        Raises:
            ValueError: a string is empty, or contains U+FFFD, which decoders write for incomplete characters.
        """
        for string in strings:
            if not string:
                raise ValueError("a stop string is empty and would end every response at once; remove it")
            if "\ufffd" in string:
                raise ValueError(
                    f"stop string {string!r} contains U+FFFD, which decoders write for incomplete characters; remove it"
                )
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max((len(string.encode("utf-8")) for string in strings), default=0) + _ALIGNMENTS
        self._has_text: dict[int, bool] = {}

    def find(self, token_ids: Int[np.ndarray, " tokens"], start: int) -> int | None:
        """Returns the number of tokens up to and including the first token that completes a stop string, or None.

        Args:
            token_ids: the response so far.
            start: number of tokens that earlier calls have already searched.
        """
        if not self._strings or start == len(token_ids):
            return None
        places = self._tail(token_ids, start)
        tail = token_ids[places]
        text = self._tokenizer.decode(tail)
        # Further tokens change decoded text only where it has U+FFFD. So if the text of all tokens has no U+FFFD, it contains
        # every stop string that the text of fewer tokens contains.
        if "\ufffd" not in text and not self._holds(text):
            return None
        fresh = (end for end, place in enumerate(places, start=1) if place >= start)
        return next((places[end - 1] + 1 for end in fresh if self._completes(tail, end)), None)

    def decode(self, ids: Int[np.ndarray, " tokens"]) -> str:
        """Returns the text of `ids` up to the earliest stop string, or all of the text if it has no stop string."""
        text = self._tokenizer.decode(ids)
        return text[: min((place for s in self._strings if (place := text.find(s)) >= 0), default=len(text))]

    def _tail(self, token_ids: Int[np.ndarray, " tokens"], start: int) -> list[int]:
        """Returns the positions of the new tokens with text, and of as many earlier tokens with text as a window needs."""
        needed = self._window + _ALIGNMENTS
        while start > 0 and needed > 0:
            start -= 1
            needed -= self._text_in(int(token_ids[start]))
        return [place for place in range(start, len(token_ids)) if self._text_in(int(token_ids[place]))]

    def _completes(self, tail: Int[np.ndarray, " tail"], end: int) -> bool:
        """Returns whether the window that ends at `end` contains a stop string. Tries several starts, because the first token may begin inside a character."""
        begin = max(0, end - self._window)
        starts = range(begin, max(begin - _ALIGNMENTS, -1), -1)
        return any(self._holds(self._tokenizer.decode(tail[at:end])) for at in starts)

    def _holds(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _text_in(self, token: int) -> bool:
        """Returns whether the token has text. The token is decoded twice in a row, because decoders may drop the first space of a text."""
        if token not in self._has_text:
            self._has_text[token] = bool(self._tokenizer.decode(np.array([token, token], np.int32)))
        return self._has_text[token]


def stop_ids(tokenizer: Tokenizer, extra: Sequence[int]) -> tuple[int, ...]:
    """Returns all ids that end a response, without duplicates: first the tokenizer's ids, beginning with `eos_id`, and then `extra`.

    Raises:
        ValueError: an id is not in the tokenizer's vocabulary.
    """
    outside = [token for token in extra if not 0 <= token < tokenizer.vocab_size]
    if outside:
        raise ValueError(
            f"sampling.stop_token_ids: {outside[0]} is not in the tokenizer's vocabulary of {tokenizer.vocab_size} ids, "
            f"0 to {tokenizer.vocab_size - 1}"
        )
    return tuple(dict.fromkeys((*tokenizer.stop_ids, *extra)))
