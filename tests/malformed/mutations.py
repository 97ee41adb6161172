"""Random damage to bytes, to text and to what JSON says, from a seeded generator: the same inputs in every run."""

import copy
import json

ODD_VALUES = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, float("nan"), float("inf"), 1e308, "", "x", "\ud800", "\x00", "🦊", "../x",
    [], {}, [[]], [None], [1, "a"], {"": None}, {"x": {"x": {}}}, "9" * 5000,
)  # fmt: skip
ODD_BYTES = (b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n", b"\t", b"'", b'"', b"{", b"}", b"[", b"]", b":", b"&a ", b"*a ", b"!!python/object:os.system ", b"${x}", b"\xed\xa0\x80", b"1e999", b"NaN")  # fmt: skip


def damaged(content, rng):
    """Bytes cut, flipped, filled, moved or inserted into: one to three times."""
    for _ in range(int(rng.integers(1, 4))):
        content = _damaged_once(content, rng)
    return content


def _damaged_once(content, rng):
    if not content:
        return ODD_BYTES[rng.integers(len(ODD_BYTES))]
    start = int(rng.integers(len(content)))
    stop = min(len(content), start + int(rng.integers(1, 64)))
    kind = rng.integers(7)
    if kind == 0:
        return content[:start]
    if kind == 1:
        return content[:start] + bytes([content[start] ^ (1 << int(rng.integers(8)))]) + content[start + 1 :]
    if kind == 2:
        return content[:start] + ODD_BYTES[rng.integers(len(ODD_BYTES))] + content[start:]
    if kind == 3:
        return content[:start] + content[stop:]
    if kind == 4:
        return content[:stop] + content[start:]
    if kind == 5:
        return content[:start] + b"\x00" * (stop - start) + content[stop:]
    return content[:start] + rng.bytes(stop - start) + content[stop:]


def changed(value, rng):
    """A copy of plain data in which one to three values are others, gone, or deep inside brackets."""
    value = copy.deepcopy(value)
    for _ in range(int(rng.integers(1, 4))):
        value = _changed_once(value, rng)
    return value


def _changed_once(value, rng):
    places = list(_places(value))
    if not places:
        return ODD_VALUES[rng.integers(len(ODD_VALUES))]
    container, key = places[rng.integers(len(places))]
    kind = rng.integers(6)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = _deep(container[key], int(rng.integers(2, 60)))
    elif kind == 2 and isinstance(container, dict):
        container[str(ODD_VALUES[rng.integers(len(ODD_VALUES))])[:40]] = container.pop(key)
    elif kind == 3:
        other, its = places[rng.integers(len(places))]
        container[key] = copy.deepcopy(other[its])
    else:
        container[key] = copy.deepcopy(ODD_VALUES[rng.integers(len(ODD_VALUES))])
    return value


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def _deep(value, levels):
    for _ in range(levels):
        value = [value]
    return value


def as_json(value):
    """Bytes, half surrogates included; NaN and Infinity as Python writes them."""
    return json.dumps(value).encode()
