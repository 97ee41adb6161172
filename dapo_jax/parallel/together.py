"""Coordination of all processes: barriers, programs that no process runs before all processes have compiled them, and the exchange of bytes.

A collective fails if a process arrives too late (after half a minute with Gloo on CPU). A process can be late by more than this time if
it has extra work, or if its compilation takes longer. Such a collective is therefore preceded by a barrier with a longer limit.

An all-gather requires the same shape in all processes, and is compiled for each new shape. So messages are split into buffers of a fixed
size, and every process sends as many buffers as the longest message requires.
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
"""Seconds to wait at a barrier for other processes. If one of them fails, the wait ends much sooner."""

_numbers = itertools.count()


class Together:
    """A jitted program with collectives. All processes must call all such programs in the same order. For a single process, the wrapper has no overhead."""

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
        """Lowers the program for these arguments, which may be shapes."""
        return self._program.lower(*arguments)


def meet() -> None:
    """Waits at a barrier until every process has called this function as many times as this process."""
    if jax.process_count() > 1:
        place, patience_ms = f"dapo_jax/met/{next(_numbers)}", _PATIENCE_S * 1000
        coordination_service().client.wait_at_barrier(place, timeout_in_ms=patience_ms)


def coordination_service() -> Any:
    """Returns JAX's internal state of the connection to the other processes: `client`, `process_id` and `num_processes`. It has no public API."""
    from jax._src import distributed

    return distributed.global_state


BUFFER_BYTES = 1 << 20
"""Size of the buffer that each process sends per round. During a round, each device stores the buffers of all processes: 32 MiB with 32 processes."""

_HEAD = 8
"""Size of each message's header, which contains the length of the message."""


def all_gather_bytes(message: bytes, *, buffer_bytes: int = BUFFER_BYTES) -> list[bytes]:
    """Gathers one message from each process, and returns the messages in process order. All processes must make the same calls in the same order."""
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
    """Exchanges buffer `number` of each process's message, and returns these buffers in process order, padded with zeros."""
    part = framed[number * buffer_bytes : (number + 1) * buffer_bytes]
    buffer = np.frombuffer(part.ljust(buffer_bytes, b"\0"), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(buffer))
    return [bytearray(row.tobytes()) for row in gathered]


def broadcast_from_first(value: bytes) -> bytes:
    """Returns the first process's value in every process."""
    return all_gather_bytes(value)[0]


def by_first(work: Callable[[], bytes]) -> bytes:
    """Calls `work` in the first process only. In every process, returns the result of this call or raises its error.

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
    meet()  # Without this barrier, the collective could time out while `work` runs.
    outcome = broadcast_from_first(kind.ljust(1) + result)
    if error is not None:
        raise error
    if outcome[:1] == b"c":
        raise ConfigError(outcome[1:].decode())
    if outcome[:1] == b"e":
        raise RuntimeError(f"the first process failed: {outcome[1:].decode()}")
    return outcome[1:]
