"""JetStream 0.2.2's orchestrator and server modules, with what fails or harms on import put right.

Upstream is archived, so what is wrong in its last release stays wrong.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """JetStream's orchestrator sets the root logger to DEBUG, and to print, when it is imported."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


with _root_logger_kept():
    from jetstream.core import orchestrator, server_lib
    from jetstream.core.proto import jetstream_pb2

messages: Any = jetstream_pb2
"""Requests and responses; generated, without types."""


def _delete_pytree(p: Any) -> None:
    for leaf in jax.tree.leaves(p):
        if isinstance(leaf, jax.Array):
            leaf.delete()


# Its own calls `jax.tree_map`, which is gone: the first request would end the process.
orchestrator.delete_pytree = _delete_pytree

__all__ = ["messages", "orchestrator", "server_lib"]
