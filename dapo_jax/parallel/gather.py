"""Bytes from every process to every process.

An all-gather needs one shape everywhere, and a shape that was not seen before is compiled for: so whatever the lengths, what
travels are buffers of one size, as many as the longest message needs.
"""

import math
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from dapo_jax.config import ConfigError
from dapo_jax.parallel.together import meet

BUFFER_BYTES = 1 << 20
"""The bytes that one process sends in a round. Each device holds as much from all of them for that long: 32 MiB with 32 processes."""

_HEAD = 8
"""Bytes in front of a message that say how long it is."""


def all_gather_bytes(message: bytes, *, buffer_bytes: int = BUFFER_BYTES) -> list[bytes]:
    """The messages of all processes, by process index. Every process must call it, in the same order of calls."""
    if jax.process_count() == 1:
        return [message]
    framed = len(message).to_bytes(_HEAD, "little") + message
    received = _round(framed, 0, buffer_bytes)
    lengths = [int.from_bytes(part[:_HEAD], "little") for part in received]
    for number in range(1, math.ceil((_HEAD + max(lengths)) / buffer_bytes)):
        for whole, part in zip(received, _round(framed, number, buffer_bytes), strict=True):
            whole += part
    return [bytes(whole[_HEAD : _HEAD + length]) for whole, length in zip(received, lengths, strict=True)]


def _round(framed: bytes, number: int, buffer_bytes: int) -> list[bytearray]:
    """Every process's buffer of one round; beyond the end of a message it holds zeros."""
    part = framed[number * buffer_bytes : (number + 1) * buffer_bytes]
    buffer = np.frombuffer(part.ljust(buffer_bytes, b"\0"), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(buffer))
    return [bytearray(row.tobytes()) for row in gathered]


def broadcast_from_first(value: bytes) -> bytes:
    """The first process's value, in every process."""
    return all_gather_bytes(value)[0]


def by_first(work: Callable[[], bytes]) -> bytes:
    """Calls `work` in the first process alone, and returns its result in every process; none is left waiting for one that failed.

    Raises:
        Exception: in the first process, what `work` raised.
        ConfigError: in the others, if it was one.
        RuntimeError: in the others, if it was something else.
    """
    kind, result, error = b"", b"", None
    if jax.process_index() == 0:
        try:
            result = work()
        except Exception as found:
            kind, error = (b"c" if isinstance(found, ConfigError) else b"e"), found
            result = (str(found) if kind == b"c" else f"{type(found).__name__}: {found}").encode()
    meet()  # the work may take longer than a collective waits
    said = broadcast_from_first(kind.ljust(1) + result)
    if error is not None:
        raise error
    if said[:1] == b"c":
        raise ConfigError(said[1:].decode())
    if said[:1] == b"e":
        raise RuntimeError(f"the first process failed: {said[1:].decode()}")
    return said[1:]
