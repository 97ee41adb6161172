"""Stop ids and stop strings, which end a response in addition to the model's end token."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cache

import numpy as np
from jaxtyping import Int

from dapo_jax.text.chat import ChatTemplate
from dapo_jax.text.special_tokens import FIRST_GUARD, Before
from dapo_jax.text.tokenizers import Tokenizer

_ALIGNMENTS = 4
"""Maximum number of bytes in a UTF-8 character. Among this many consecutive bytes, at least one begins a character."""


class StopStrings:
    """Finds the first token at which the text of a response contains a stop string.

    A stop string is complete at token n if the text of the first n tokens contains it. Tokens up to and including token n
    are kept and trained on. As in vLLM, the text from `decode`, which graders receive, ends before the stop string.

    Only the most recent tokens are decoded. Every token with text has at least one byte, so a stop string of B bytes that ends in
    token n begins within the last B tokens with text. Four more tokens are decoded, because a decoder may drop the first space
    of a text, and the first token may begin inside a character. Tokens without text are skipped. A special token has text only
    if a stop string contains it. The result does not depend on the number of new tokens per call to `find`.

    >>> from dapo_jax.text.tokenizers import ByteTokenizer
    >>> stop = StopStrings(ByteTokenizer(), ["END"])
    >>> tokens = ByteTokenizer().encode("7 END.")
    >>> stop.find(tokens, 0), stop.find(tokens[:4], 0), stop.decode(tokens)
    (5, None, '7 ')
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], ids: Sequence[int] = ()) -> None:
        """Stores the strings, and token ids that act like stop strings. Without both, `find` always returns None. Raises ValueError if a string is invalid."""
        for string in strings:
            if not string or "\ufffd" in string:
                raise ValueError(
                    f"stop string {string!r} is empty, or contains U+FFFD, which decoders write for incomplete characters; remove it"
                )
        self._tokenizer = tokenizer
        special: Mapping[str, int] = getattr(tokenizer, "special_tokens", {}) if strings else {}
        spelled = sorted((text for text in special if any(text in stop for stop in strings)), key=len)[::-1]
        marked = dict.fromkeys([*(special[text] for text in spelled), *ids])
        self._marks = {token: chr(ord(FIRST_GUARD) + number) for number, token in enumerate(marked)}
        self._special = {text: self._marks[special[text]] for text in spelled}  # the longest first
        self.strings = (*strings, *map(self.marked, strings), *(self._marks[token] for token in ids))
        """The stop strings, their `marked` forms, and the marks of the ids."""
        self._window = max((len(string.encode("utf-8")) for string in strings), default=0) + _ALIGNMENTS
        self.has_text = cache(lambda token: bool(self.text([token, token])))
        """Whether a token has text. The token is decoded twice in a row, because decoders may drop the first space of a text."""

    def find(self, token_ids: Int[np.ndarray, " tokens"], start: int) -> int | None:
        """Returns the number of tokens up to and including the first token that completes a stop string, or None.

        `token_ids` is the response so far, and earlier calls have already searched its first `start` tokens.
        """
        if not self.strings or start == len(token_ids):
            return None
        positions = self._tail(token_ids, start)
        tail = token_ids[positions]
        text = self.text(tail)
        # Further tokens change decoded text only where it has U+FFFD. So if the text of all tokens has no U+FFFD, it contains
        # every stop string that the text of fewer tokens contains.
        if "\ufffd" not in text and not self._holds(text):
            return None
        new = (end for end, position in enumerate(positions, start=1) if position >= start)
        return next((positions[end - 1] + 1 for end in new if self._completes(tail, end)), None)

    def decode(self, ids: Int[np.ndarray, " tokens"], after: Before = None) -> str:
        """Returns the text of `ids`, which follow the tokens `after`, up to the earliest stop string, or all of the text if it has no stop string."""
        text = self.text(ids, after)
        # `find` does not see a first space that only `after` keeps.
        first = 0 if after is None else len(self.text(ids[:8], after)) - len(self.text(ids[:8]))
        end = min((start for s in self.strings if (start := text.find(s, first)) >= 0), default=len(text))
        return self.unmarked(text[:end])

    def text(self, ids: Int[np.ndarray, " tokens"] | list[int], after: Before = None) -> str:
        """Returns the text of `ids`, which follow the tokens `after`, with a private-use character, a mark, for each stop id and each special token in a stop string. Unknown ids have no text."""
        size, marks = self._tokenizer.vocab_size, self._marks
        known = np.array([token for token in ids if 0 <= token < size or token in marks], np.int32)
        first, *others = np.split(known, np.flatnonzero(np.isin(known, [*marks])))
        texts = (marks[int(tokens[0])] + self._tokenizer.decode(tokens[1:]) for tokens in others)
        before = {} if after is None else {"after": after}
        return self._tokenizer.decode(first, **before) + "".join(texts)

    def marked(self, text: str) -> str:
        """Returns the text with the mark of each special token that a stop string contains."""
        for special, mark in self._special.items():
            text = text.replace(special, mark)
        return text

    def unmarked(self, text: str) -> str:
        """Returns the text without marks."""
        return text.translate(dict.fromkeys(map(ord, self._marks.values())))

    def _tail(self, token_ids: Int[np.ndarray, " tokens"], start: int) -> list[int]:
        """Returns the positions of the new tokens with text, and of as many earlier tokens with text as a window needs."""
        needed = self._window + _ALIGNMENTS
        while start > 0 and needed > 0:
            start -= 1
            needed -= self.has_text(int(token_ids[start]))
        return [at for at in range(start, len(token_ids)) if self.has_text(int(token_ids[at]))]

    def _completes(self, tail: Int[np.ndarray, " tail"], end: int) -> bool:
        """Returns whether the window that ends at `end` contains a stop string. Tries several starts, because the first token may begin inside a character."""
        begin = max(0, end - self._window)
        starts = range(begin, max(begin - _ALIGNMENTS, -1), -1)
        return any(self._holds(self.text(tail[at:end])) for at in starts)

    def _holds(self, text: str) -> bool:
        return any(string in text for string in self.strings)


def turn_end(tokenizer: Tokenizer) -> int:
    """Returns the id that the chat template writes after an answer, such as Gemma's `<end_of_turn>`, or `eos_id` if it writes none."""
    turns = [{"role": role, "content": FIRST_GUARD + role} for role in ("user", "assistant", "user")]
    with suppress(ValueError):  # the template refuses these turns
        template = tokenizer.chat_template or ChatTemplate("", name="none")
        before, _, text = template.render(turns, today=date(2024, 7, 26)).partition(turns[0]["content"])
        after = text.partition(turns[1]["content"])[2].partition(FIRST_GUARD)[0].lstrip()
        [first, *_] = tokenizer.encode(after).tolist()
        plain = {*tokenizer.encode_plain(after).tolist(), *tokenizer.encode_plain(before).tolist()}
        # gpt-oss ends its thoughts and an earlier answer with the same token.
        plain |= getattr(tokenizer, "marks", set())
        begins = [token for token in tokenizer.encode(before).tolist() if token not in plain][-1:]
        # Without an end token, the next turn follows. Its first token ends an answer only if the files say so, as in GLM 4.
        if first not in plain and ([first] != begins or first in tokenizer.stop_ids):
            return first
    return tokenizer.eos_id


def stop_ids(tokenizer: Tokenizer, extra: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns all ids that end a response, without duplicates: the tokenizer's ids, beginning with `eos_id`, then `turn_end`, and then `extra`.

    Raises ValueError if an id is not in the tokenizer's vocabulary.
    """
    size = tokenizer.vocab_size
    if outside := [token for token in extra if not 0 <= token < size]:
        problem = (
            f"{outside[0]} is not in the tokenizer's vocabulary of {size} ids, 0 to {size - 1}; remove it"
        )
        raise ValueError(f"sampling.stop_token_ids: {problem}")
    return tuple(dict.fromkeys((*tokenizer.stop_ids, turn_end(tokenizer), *extra)))
