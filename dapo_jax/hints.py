"""Hints for error messages: the names most similar to an unknown one, and how to install an extra."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


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


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra, from the checkout or the wheel: the package is on no index."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'WHEEL[{extra}]', with the wheel's path for WHEEL"
    where = "" if checkout == Path.cwd() else f" in {checkout}"
    return f"pip install -e '.[{extra}]'{where}"
