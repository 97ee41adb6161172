"""The microbatches of an update on the mesh: those of one shape in one array, so that one program goes through them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Int

from dapo_jax.dapo.microbatch import Microbatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stack:
    """Microbatches of one shape on the mesh."""

    microbatches: Microbatch
    """Each array is [capacity, rows, seq]."""
    count: Int[Array, ""] | Any
    """How many there are; the rest is room that nothing reads."""

    def at(self, index: Int[Array, ""]) -> Microbatch:
        """One of them."""
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), self.microbatches
        )

    def with_arrays(self, **arrays: Float[Array, "capacity rows seq"]) -> "Stack":
        """The same with some arrays of its microbatches replaced."""
        return replace(self, microbatches=replace(self.microbatches, **arrays))


Minibatch = tuple[Stack, ...]
"""The microbatches of one update: a stack for each length of rows, the longest first."""


def with_array(minibatch: Minibatch, name: str, made: Callable[[Stack], Array]) -> Minibatch:
    """The minibatch with the array `name` made of each stack."""
    return tuple(stack.with_arrays(**{name: made(stack)}) for stack in minibatch)


def on_host(arrays: Any) -> Any:
    """A minibatch, or any other tree of arrays on the mesh, as numpy arrays. Of several processes all must ask."""
    return jax.tree.map(
        lambda array: np.asarray(multihost_utils.process_allgather(array, tiled=True)), arrays
    )


def stack_capacity(microbatches: int) -> int:
    """The number of microbatches for which a program is compiled that goes through so many: a power of 2, since steps differ in how many they have."""
    return 1 << (microbatches - 1).bit_length()


class Placing:
    """Puts microbatches on the mesh: the host/device boundary."""

    def __init__(self, sharding: jax.sharding.Sharding) -> None:
        """`sharding` is that of an array [capacity, rows, seq]."""
        self._sharding = sharding
        self._capacity: dict[int, int] = {}

    def put(self, minibatches: Sequence[Sequence[Microbatch]]) -> list[Minibatch]:
        """The stacks of each minibatch; those of one row length have the same capacity in all of them."""
        stacks = [_by_length(minibatch) for minibatch in minibatches]
        # Capacity only grows: a program is compiled for each.
        for tokens, same in chain.from_iterable(by_length.items() for by_length in stacks):
            self._capacity[tokens] = max(self._capacity.get(tokens, 1), stack_capacity(len(same)))
        return [
            tuple(self._stack(same, self._capacity[tokens]) for tokens, same in by_length.items())
            for by_length in stacks
        ]

    def _stack(self, microbatches: Sequence[Microbatch], capacity: int) -> Stack:
        def place(*parts: np.ndarray) -> Array:
            whole = np.zeros((capacity, *parts[0].shape), parts[0].dtype)
            whole[: len(parts)] = parts
            # Of several processes each has the whole array, and puts what is its devices' there.
            return jax.make_array_from_callback(whole.shape, self._sharding, lambda index: whole[index])

        return Stack(jax.tree.map(place, *microbatches), np.int32(len(microbatches)))


def _by_length(minibatch: Sequence[Microbatch]) -> dict[int, list[Microbatch]]:
    """The microbatches of each row length, the longest first."""
    lengths = sorted({one.tokens.shape[1] for one in minibatch}, reverse=True)
    return {tokens: [one for one in minibatch if one.tokens.shape[1] == tokens] for tokens in lengths}
