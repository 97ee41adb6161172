"""How much longer the replacements of a tokenizer.json may make a text: a dozen of them can make a terabyte of one letter.

A file of its own: it judges a file before the library `tokenizers` reads it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MOST = 1000
"""Characters that may be made of one."""


def check_expansion(steps: Any, where: str) -> None:
    """Refuses a normalizer or a decoder whose `Replace` steps may make more than `MOST` characters of one.

    The bound is found from the last step to the first: to how many characters each character may grow from there on. A text that is
    replaced grows as its content does, shared among the characters of the pattern.

    Args:
        steps: `normalizer` or `decoder` of tokenizer.json.
        where: the file and the part, for the message.

    Raises:
        ValueError: it is one.
    """
    others = 1.0  # of all characters that are not in `own`
    own: dict[str, float] = {}
    for step in reversed(list(_steps(steps))):
        if step.get("type") != "Replace":
            # It may make any character of any other, as lower case does.
            others, own = max(others, *own.values(), 1.0), {}
            continue
        pattern, content = step.get("pattern"), step.get("content")
        if not isinstance(pattern, Mapping) or not isinstance(content, str):
            continue  # the library says what is wrong with it
        made = sum(own.get(char, others) for char in content)
        text = pattern.get("String")
        if isinstance(text, str) and text:
            own |= {char: max(own.get(char, others), made / len(text)) for char in text}
        elif _matches_nothing(pattern.get("Regex")):
            others, own = others + made, {char: grown + made for char, grown in own.items()}
        else:
            others, own = max(others, made), {char: max(grown, made) for char, grown in own.items()}
        if (most := max(others, *own.values(), 1.0)) > MOST:
            raise ValueError(
                f"{where}: its Replace steps may make {most:.3g} characters of one, and at most {MOST} are taken; leave out the "
                "steps that make texts longer"
            )


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of sequences inside one another, in their order."""
    left = [part]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += reversed(one)
        elif isinstance(one, Mapping):
            inside = [one[name] for name in ("normalizers", "decoders") if name in one]
            if inside:
                left += inside
            else:
                yield one


def _matches_nothing(pattern: Any) -> bool:
    """True if a pattern may match the empty text, and so stand between any two characters; also if that cannot be told."""
    try:
        return re.compile(pattern).search("") is not None
    except (re.error, TypeError, RecursionError):
        return True
