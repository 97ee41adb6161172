"""Barriers before collectives, and programs that all processes compile before any of them runs.

A collective waits for a limited time (half a minute on CPU, Gloo). Work of one process alone may take longer, and so may one
process's compilation, if machines or caches differ.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax

_PATIENCE_S = 3600
"""Seconds to wait for the others; a failure of one is noticed at once."""

_numbers = itertools.count()


class Together:
    """A jitted program that every process calls, in the same order of calls. It adds nothing if there is one process."""

    def __init__(self, program: Any, *, compiled: Callable[[], None] | None = None) -> None:
        """`compiled` is called after this process has compiled; None waits for the others."""
        self._program, self._compiled = program, compiled or meet
        self._known: set[Any] = set()

    def __call__(self, *arguments: Any) -> Any:
        if jax.process_count() > 1 and (shapes := _shapes(arguments)) not in self._known:
            self._program.lower(*arguments).compile()
            self._compiled()
            self._known.add(shapes)
        return self._program(*arguments)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Returns the lowered program for arguments of these shapes."""
        return self._program.lower(*arguments)


def _shapes(arguments: tuple[Any, ...]) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def meet() -> None:
    """Waits until all processes have called this as often as this one."""
    if jax.process_count() == 1:
        return
    from jax._src import distributed  # JAX has no public name for its coordination service

    client: Any = distributed.global_state.client
    client.wait_at_barrier(f"dapo_jax/met/{next(_numbers)}", timeout_in_ms=_PATIENCE_S * 1000)
