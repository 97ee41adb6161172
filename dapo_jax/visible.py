"""Text of others for a terminal: data, responses and messages that quote them."""

import unicodedata

_KEPT = "\n\t\u200c\u200d"
"""Line ends and tabs; and the joiners without width that Persian, Indic scripts and emoji are written with."""
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: control characters, formats such as marks of direction, halves of surrogate pairs, line and paragraph separators."""


def visible(text: str) -> str:
    r"""`text` with each character that a terminal would obey, or that hides or reorders others, written as Python writes it.

    >>> visible("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char
        if char in _KEPT or unicodedata.category(char) not in _HIDDEN
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
