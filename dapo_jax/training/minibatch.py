"""Transfers the microbatches of an update to the mesh. Microbatches of the same shape are stacked, so that a single program can loop over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

from dapo_jax.dapo.microbatch import Microbatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stack:
    """Microbatches of the same shape, stacked into arrays on the mesh."""

    microbatches: Microbatch
    """Each array has shape [capacity, rows, seq]."""
    count: Int[Array, ""] | Any
    """Number of microbatches in the stack. Entries beyond this number are unused."""

    def at(self, index: Int[Array, ""]) -> Microbatch:
        """Returns the microbatch at `index`."""
        select = partial(lax.dynamic_index_in_dim, index=index, keepdims=False)
        return jax.tree.map(select, self.microbatches)

    def with_arrays(self, **arrays: Any) -> "Stack":
        """Returns a copy with other values of these fields of `Microbatch`."""
        return replace(self, microbatches=replace(self.microbatches, **arrays))


Minibatch = tuple[Stack, ...]
"""The microbatches of one update: one stack per row length, longest rows first."""


def with_array(minibatch: Minibatch, name: str, compute: Callable[[Stack], Array | None]) -> Minibatch:
    """Returns a copy of the minibatch in which the array `name` of each stack is replaced by `compute(stack)`."""
    return tuple(stack.with_arrays(**{name: compute(stack)}) for stack in minibatch)


def on_host(arrays: Any) -> Any:
    """Copies a minibatch, or any other tree of arrays on the mesh, to numpy arrays on the host. All processes must call this function."""
    gather = partial(multihost_utils.process_allgather, tiled=True)
    return jax.tree.map(lambda array: np.asarray(gather(array)), arrays)


def stack_capacity(microbatches: int) -> int:
    """Rounds a number of microbatches up to the capacity of a stack. Capacities are powers of 2, so that few programs are compiled."""
    return 1 << (microbatches - 1).bit_length()


class MinibatchTransfer:
    """Transfers microbatches from the host to the mesh."""

    def __init__(self, sharding: jax.sharding.Sharding) -> None:
        """`sharding` is the sharding of arrays with shape [capacity, rows, seq]."""
        self._sharding = sharding
        self._capacity: dict[int, int] = {}

    def put(self, minibatches: Sequence[Sequence[Microbatch]]) -> list[Minibatch]:
        """Transfers minibatches to the mesh, and returns the stacks of each minibatch. All stacks with the same row length have the same capacity."""
        stacks: list[dict[int, list[Microbatch]]] = []
        for minibatch in minibatches:
            stacks.append({})
            for microbatch in sorted(minibatch, key=lambda m: -m.tokens.shape[1]):
                tokens = microbatch.tokens.shape[1]
                same = stacks[-1].setdefault(tokens, [])
                same.append(microbatch)
                # The capacity for a row length never shrinks, because each new capacity costs a compilation.
                self._capacity[tokens] = max(self._capacity.get(tokens, 1), stack_capacity(len(same)))
        return [
            tuple(self._stack(same, self._capacity[tokens]) for tokens, same in by_length.items())
            for by_length in stacks
        ]

    def _stack(self, microbatches: Sequence[Microbatch], capacity: int) -> Stack:
        def transfer(*arrays: np.ndarray) -> Array:
            whole = np.zeros((capacity, *arrays[0].shape), arrays[0].dtype)
            whole[: len(arrays)] = arrays
            # Every process has built the whole array, but transfers only the shards of its own devices.
            return jax.make_array_from_callback(whole.shape, self._sharding, lambda index: whole[index])

        return Stack(jax.tree.map(transfer, *microbatches), np.int32(len(microbatches)))
