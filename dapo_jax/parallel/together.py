"""Processes that wait for each other before a collective, and programs that are compiled in all of them before any of them runs one.

A collective waits only so long for the others (half a minute on CPU, Gloo). What one process does alone may take longer, and so may compilations of one program
differ where machines or caches do.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax

_PATIENCE_S = 3600
"""A process may take so long; one that fails or ends is heard of at once."""

_numbers = itertools.count()


class Together:
    """A jitted program that every process calls, in the same order of calls. Where there is one process it is the program itself."""

    def __init__(self, program: Any, *, compiled: Callable[[], None] | None = None) -> None:
        """`compiled` is called when this process has compiled; None: the others are waited for."""
        self._program, self._compiled = program, compiled or meet
        self._known: set[Any] = set()

    def __call__(self, *arguments: Any) -> Any:
        if jax.process_count() > 1 and (shapes := _shapes(arguments)) not in self._known:
            self._program.lower(*arguments).compile()
            self._compiled()
            self._known.add(shapes)
        return self._program(*arguments)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """The program for arguments of these shapes."""
        return self._program.lower(*arguments)


def _shapes(arguments: tuple[Any, ...]) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def meet() -> None:
    """Waits until all processes have come here as often as this one; for nobody where it is alone."""
    if jax.process_count() == 1:
        return
    from jax._src import distributed  # JAX has no public name for its coordination service

    client: Any = distributed.global_state.client
    client.wait_at_barrier(f"dapo_jax/met/{next(_numbers)}", timeout_in_ms=_PATIENCE_S * 1000)
