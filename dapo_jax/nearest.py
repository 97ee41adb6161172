"""The names most similar to an unknown name, for every "did you mean"."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], *, count: int = 1, least: float = 0.5) -> list[str]:
    """Returns at most `count` of the `known` names most similar to `word`, best first, ignoring case.

    Args:
        word: the unknown name.
        known: the valid names.
        count: most names to return.
        least: similarity, from 0 to 1, below which a name is left out; 0 always returns one.

    >>> nearest("Adapo", ["exact", "dapo", "math"]), nearest("xyz", ["exact", "dapo"])
    (['dapo'], [])
    """
    by_lower = {name.lower(): name for name in reversed(list(known))}
    found = get_close_matches(word.lower(), list(by_lower), n=count, cutoff=least)
    return [by_lower[name] for name in found]
