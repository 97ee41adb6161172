"""Characters that stand for others while a chat template is at work, so that no text from outside becomes a special token.

A special token begins with its first character. Where a text from outside has such a character, the template sees another in its place: what is
spelled like a special token in what the template made then is one that the template wrote itself.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

FIRST_GUARD = "\U0010f000"
"""The first of the characters that stand for others; no text from outside may hold it or a later one. Nobody uses them: the plane is private."""


class Guards:
    """The characters that stand for those which the special tokens of a vocabulary begin with.

    >>> guards = Guards(["<|im_end|>", "</s>"])
    >>> guards.guarded("1 < 2"), guards.restored(guards.guarded("1 < 2"))
    ('1 \\U0010f001 2', '1 < 2')
    """

    def __init__(self, special: Iterable[str]) -> None:
        self._firsts = sorted({text[0] for text in special if text})

    def guarded(self, text: str) -> str:
        """The text with other characters in place of those that special tokens begin with.

        Raises:
            ValueError: half a surrogate pair, or a character from `FIRST_GUARD` on.
        """
        text.encode("utf-8")  # which says where the surrogate is
        if (last := max(text, default="")) >= FIRST_GUARD:
            raise ValueError(
                f"a text holds the private character U+{ord(last):X}; those from U+{ord(FIRST_GUARD):X} on are taken for other use"
            )
        return text.translate(self._guards)

    def restored(self, text: str) -> str:
        """The text with the characters back in their places."""
        return text.translate({ord(guard): chr(first) for first, guard in self._guards.items()})

    @cached_property
    def _guards(self) -> Mapping[int, str]:
        return {ord(first): chr(ord(FIRST_GUARD) + 1 + place) for place, first in enumerate(self._firsts)}
