"""Numbers that look random and depend on their place alone: the same under every version of every library."""

import hashlib


def uniform(*place: str | int) -> float:
    """A number in [0, 1) for a place, such as ("split", seed, row).

    >>> uniform("split", 0, 1) == uniform("split", 0, 1) != uniform("split", 0, 2)
    True
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
