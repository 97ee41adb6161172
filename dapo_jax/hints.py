"""Hints for error messages: known names that are similar to an unknown name, and the command that installs an extra."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path


def nearest(word: str, known: Iterable[str], *, count: int = 1, least: float = 0.5) -> list[str]:
    """Returns up to `count` of the `known` names that are most similar to `word`, best first, ignoring case.

    Their similarity is at least `least`, from 0 to 1. 0 allows names that have nothing in common with `word`.

    >>> nearest("Adapo", ["exact", "dapo", "math"]), nearest("xyz", ["exact", "dapo"])
    (['dapo'], [])
    """
    by_lower = {name.lower(): name for name in reversed(list(known))}
    return [by_lower[name] for name in get_close_matches(word.lower(), list(by_lower), n=count, cutoff=least)]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Returns a hint for a message: the known names that are most similar to `name`, or all known names."""
    similar = " or ".join(map(repr, nearest(name, known, count=3)))
    return f"did you mean {similar}?" if similar else f"there are {', '.join(sorted(known))}"


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises a ValueError that suggests the nearest choice if `value` is not one of them."""
    if value not in choices:
        similar = nearest(value, choices, least=0.0)[0]
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}; did you mean {similar!r}?")


@contextmanager
def needing(extra: str, what: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Replaces an ImportError in the block by `error`, with the command that installs the extra. `what` ends with the name of the missing package."""
    try:
        yield
    except ImportError as missing:
        raise error(f"{what}: {how_to_install(extra)} (it cannot be imported: {missing})") from missing


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra. It installs from the checkout or the wheel, since the package is not on PyPI."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'WHEEL[{extra}]', where WHEEL is the path of the wheel"
    where = "" if checkout == Path.cwd() else f" in {checkout}"
    return f"pip install -e '.[{extra}]'{where}"
