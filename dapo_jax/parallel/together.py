"""Work of all processes together: barriers, programs that all compile before one runs, and exchange of bytes.

A collective waits for a limited time (half a minute on CPU, Gloo). Work of one process alone may take longer, and so may one
process's compilation, if machines or caches differ. So there is a barrier before each of these.

An all-gather needs one shape in all processes, and compiles for each new shape. So messages of any length travel in buffers of
one size, as many as the longest message needs.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dapo_jax.config import ConfigError

_PATIENCE_S = 3600
"""Seconds to wait for the others; a failure of one is noticed at once."""

_numbers = itertools.count()


class Together:
    """A jitted program that every process calls, in the same order of calls. It adds nothing if there is one process."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self._known: set[Any] = set()

    def __call__(self, *arguments: Any) -> Any:
        if jax.process_count() > 1:
            leaves, structure = jax.tree.flatten(arguments)
            shapes = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if shapes not in self._known:
                self._program.lower(*arguments).compile()
                meet()
                self._known.add(shapes)
        return self._program(*arguments)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Returns the lowered program for arguments of these shapes."""
        return self._program.lower(*arguments)


def meet() -> None:
    """Waits until all processes have called this as often as this one."""
    if jax.process_count() > 1:
        place, patience_ms = f"dapo_jax/met/{next(_numbers)}", _PATIENCE_S * 1000
        coordination_service().client.wait_at_barrier(place, timeout_in_ms=patience_ms)


def coordination_service() -> Any:
    """Returns JAX's connection to the other processes, with `client`, `process_id` and `num_processes`; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state


BUFFER_BYTES = 1 << 20
"""Bytes that one process sends per round. Each device holds the buffers of all processes meanwhile: 32 MiB with 32 processes."""

_HEAD = 8
"""Bytes before a message that hold its length."""


def all_gather_bytes(message: bytes, *, buffer_bytes: int = BUFFER_BYTES) -> list[bytes]:
    """Returns the messages of all processes, by process index. Every process must call it, in the same order of calls."""
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
    """Returns every process's buffer of one round, filled up with zeros."""
    part = framed[number * buffer_bytes : (number + 1) * buffer_bytes]
    buffer = np.frombuffer(part.ljust(buffer_bytes, b"\0"), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(buffer))
    return [bytearray(row.tobytes()) for row in gathered]


def broadcast_from_first(value: bytes) -> bytes:
    """Returns the first process's value in every process."""
    return all_gather_bytes(value)[0]


def by_first(work: Callable[[], bytes]) -> bytes:
    """Calls `work` in the first process alone, and returns its result, or raises its error, in every process.

    Raises:
        Exception: in the first process, the error of `work`.
        ConfigError: in the others, if it was a ConfigError.
        RuntimeError: in the others, if it was another error.
    """
    kind, result, error = b"", b"", None
    if jax.process_index() == 0:
        try:
            result = work()
        except Exception as found:
            kind, error = (b"c" if isinstance(found, ConfigError) else b"e"), found
            result = (str(found) if kind == b"c" else f"{type(found).__name__}: {found}").encode()
    meet()  # the work may take longer than a collective waits
    outcome = broadcast_from_first(kind.ljust(1) + result)
    if error is not None:
        raise error
    if outcome[:1] == b"c":
        raise ConfigError(outcome[1:].decode())
    if outcome[:1] == b"e":
        raise RuntimeError(f"the first process failed: {outcome[1:].decode()}")
    return outcome[1:]
