"""The parked states of responses outside the slots, which are paused or wait for an environment: logits and states of fixed size. Keys and values stay in pages."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.models.presets import DecoderConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ParkedStates:
    """The states of several responses. The engine inserts them like a `Prefix`, but there are no keys and values to write to pages."""

    logits: Float[Array, "responses vocab"] | Any
    """Logits of each response's next token; () if every response is fed before it samples."""
    lengths: Int[Array, " responses"] | Any
    states: tuple[Any, ...]
    layers: ClassVar[tuple[Any, ...]] = ()


def no_parked_states(config: DecoderConfig, rows: int, dtype: str, *, with_logits: bool) -> ParkedStates:
    """Returns empty places for `rows` responses, one for each row of the page table."""
    states = tuple(state.empty(rows, dtype) for state in config.fixed)
    logits = jnp.zeros((rows, config.vocab_rows), jnp.float32) if with_logits else ()
    return ParkedStates(logits=logits, lengths=jnp.zeros(rows, jnp.int32), states=states)


def park(
    parked: ParkedStates, of_slots: ParkedStates, places: Int[Array, "2 slots"], count: Array
) -> ParkedStates:
    """Copies the states of slots to rows. The first `count` columns of `places` are pairs of a slot and a row."""
    slots, rows = places
    rows = first(rows, count, len(parked.lengths))

    def copied(into: Array, new: Array) -> Array:
        return into.at[rows].set(new[slots], mode="drop", unique_indices=True)

    return jax.tree.map(copied, parked, of_slots)


def rows_of(states: tuple[Any, ...], rows: Int[Array, " slots"]) -> tuple[Any, ...]:
    """Returns the parked states in some rows."""
    return jax.tree.map(lambda state: state[rows], states)


def first(numbers: Int[Array, " slots"], count: Array, size: int) -> Int[Array, " slots"]:
    """Replaces all entries after the first `count` with distinct numbers of `size` or more, so that updates with mode="drop" skip them."""
    index = jnp.arange(len(numbers), dtype=jnp.int32)
    return jnp.where(index < count, numbers, size + index)
