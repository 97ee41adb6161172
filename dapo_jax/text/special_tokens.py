"""Prevents untrusted text, such as HTTP requests and tool results, from being encoded as special tokens.

Only the chat template may write special tokens. If a message contains the text of a special token, this text is encoded as ordinary characters.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

Before = Int[np.ndarray, " before"] | None
FIRST_GUARD = "\U0010f000"
"""The first of the private-use characters that are reserved for guards. Untrusted text may not contain this character or any later character."""


class Guards:
    """Protects the text of messages from becoming special tokens when a chat template is rendered.

    Before rendering, each character in the messages that can begin a special token is replaced by a private-use character,
    its guard. Any special token in the rendered text was therefore written by the template itself.

    >>> guards = Guards(["<|im_end|>", "</s>"])
    >>> guards.guarded("1 < 2"), guards.restored(guards.guarded("1 < 2"))
    ('1 \\U0010f001 2', '1 < 2')
    """

    def __init__(self, special: Iterable[str]) -> None:
        firsts = sorted({text[0] for text in special if text})
        self._guards = {ord(first): ord(FIRST_GUARD) + number for number, first in enumerate(firsts, start=1)}
        self.firsts = {guard: first for first, guard in self._guards.items()}

    def guarded(self, text: str) -> str:
        """Replaces each character that can begin a special token by its guard.

        Raises ValueError if the text contains a lone surrogate, `FIRST_GUARD`, or a later character.
        """
        text.encode("utf-8")  # raises an error with the position of a lone surrogate
        if (last := max(text, default="")) >= FIRST_GUARD:
            raise ValueError(
                f"a text contains the private-use character U+{ord(last):X}; U+{ord(FIRST_GUARD):X} and all later characters are reserved"
            )
        return text.translate(self._guards)

    def restored(self, text: str) -> str:
        """Replaces each guard by the character that it represents."""
        return text.translate(self.firsts)
