"""Coordination of all processes: barriers, programs that all processes compile before any runs them, and exchange of bytes.

A collective waits only for a limited time (half a minute with Gloo on CPU). If one process works alone, or compiles longer than others
because machines or caches differ, this can take longer. So there is a barrier before the collective.

An all-gather needs the same shape in all processes, and is compiled for each new shape. So messages are sent in buffers of a fixed
size, as many as the longest message needs.
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
"""Seconds to wait for other processes. If one of them fails, this is noticed at once."""

_numbers = itertools.count()


class Together:
    """A jitted program that every process calls, in the same order of calls. With a single process, it has no overhead."""

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
        """Lowers the program for arguments with these shapes."""
        return self._program.lower(*arguments)


def meet() -> None:
    """Waits until all processes have called this as many times as this process."""
    if jax.process_count() > 1:
        place, patience_ms = f"dapo_jax/met/{next(_numbers)}", _PATIENCE_S * 1000
        coordination_service().client.wait_at_barrier(place, timeout_in_ms=patience_ms)


def coordination_service() -> Any:
    """Returns JAX's connection to the other processes, with `client`, `process_id` and `num_processes`. JAX has no public API for this."""
    from jax._src import distributed

    return distributed.global_state


BUFFER_BYTES = 1 << 20
"""Bytes that each process sends per round. Each device stores the buffers of all processes during a round: 32 MiB with 32 processes."""

_HEAD = 8
"""Number of bytes before a message that encode its length."""


def all_gather_bytes(message: bytes, *, buffer_bytes: int = BUFFER_BYTES) -> list[bytes]:
    """Gathers a message from each process, in process order. Every process must call it, in the same order of calls."""
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
    """Returns the buffer of each process in one round, padded with zeros."""
    part = framed[number * buffer_bytes : (number + 1) * buffer_bytes]
    buffer = np.frombuffer(part.ljust(buffer_bytes, b"\0"), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(buffer))
    return [bytearray(row.tobytes()) for row in gathered]


def broadcast_from_first(value: bytes) -> bytes:
    """Returns the first process's value in every process."""
    return all_gather_bytes(value)[0]


def by_first(work: Callable[[], bytes]) -> bytes:
    """Calls `work` in the first process only, and returns its result or raises its error in every process.

    Raises:
        Exception: the error of `work`, in the first process.
        ConfigError: in the other processes, if `work` raised a ConfigError.
        RuntimeError: in the other processes, if `work` raised any other error.
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
