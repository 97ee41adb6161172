"""The known names most like one that is not known: what every "did you mean" of the library goes by."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], *, count: int = 1, least: float = 0.5) -> list[str]:
    """At most `count` of the `known` names that are most like `word`, best first; upper and lower case are the same.

    Args:
        word: what was written.
        known: the names there are.
        count: how many to offer.
        least: the likeness, from 0 to 1, below which a name is not offered; 0 always offers one.

    >>> nearest("Adapo", ["exact", "dapo", "math"]), nearest("xyz", ["exact", "dapo"])
    (['dapo'], [])
    """
    by_lower = {name.lower(): name for name in reversed(list(known))}
    found = get_close_matches(word.lower(), list(by_lower), n=count, cutoff=least)
    return [by_lower[name] for name in found]
