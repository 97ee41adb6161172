"""Keeps text from outside, such as HTTP requests and tool results, from becoming special tokens.

Only the chat template writes special tokens. A special token that is spelled out in a message is encoded as plain characters.
"""

from collections.abc import Iterable

FIRST_GUARD = "\U0010f000"
"""The first private character used as a guard. Texts from outside may hold neither this one nor a later one."""


class Guards:
    """Keeps texts of messages from becoming special tokens while a chat template is rendered.

    A special token begins with its first character. In texts from outside, a private character replaces each such
    character during rendering. A special token in the rendered text was therefore written by the template itself.

    >>> guards = Guards(["<|im_end|>", "</s>"])
    >>> guards.guarded("1 < 2"), guards.restored(guards.guarded("1 < 2"))
    ('1 \\U0010f001 2', '1 < 2')
    """

    def __init__(self, special: Iterable[str]) -> None:
        firsts = sorted({text[0] for text in special if text})
        self._guards = {ord(first): ord(FIRST_GUARD) + 1 + place for place, first in enumerate(firsts)}
        self._firsts = {guard: first for first, guard in self._guards.items()}

    def guarded(self, text: str) -> str:
        """Returns the text with guards in place of first characters.

        Raises:
            ValueError: the text has half a surrogate pair, or a character from `FIRST_GUARD` on.
        """
        text.encode("utf-8")  # raises, with the position of the surrogate
        if (last := max(text, default="")) >= FIRST_GUARD:
            raise ValueError(
                f"a text holds the private character U+{ord(last):X}; characters from U+{ord(FIRST_GUARD):X} on are reserved"
            )
        return text.translate(self._guards)

    def restored(self, text: str) -> str:
        """Returns the text with the original characters."""
        return text.translate(self._firsts)
