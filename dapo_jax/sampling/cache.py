"""The key/value cache of the decoding slots, opaque behind `empty`, `of_rows`, `fill` and `extend`.

This is the cache for every platform but TPU (`paired_cache`). The axes are in the order in which both products of attention read them row by row: over
[slots, capacity, kv_heads, head_dim] attention was 12 times slower on CPU, and scores over keys with head_dim last 2 times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.models.attention import cached_attention


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A way to keep the keys and values of one layer: four functions, which this file documents. What they pass among them is their own affair."""

    empty: Callable[..., Any]
    of_rows: Callable[..., Any]
    fill: Callable[..., Any]
    extend: Callable[..., tuple[Array, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values."""

    keys: Float[Array, "slots kv_heads head_dim capacity"] | Any
    values: Float[Array, "slots kv_heads capacity head_dim"] | Any


def empty(slots: int, kv_heads: int, capacity: int, head_dim: int, dtype: str) -> LayerCache:
    """A cache in which nothing is written yet."""
    keys = jnp.zeros((slots, kv_heads, head_dim, capacity), dtype)
    return LayerCache(keys, keys.swapaxes(2, 3))


def of_rows(
    keys: Float[Array, "kv_heads head_dim tokens"],
    values: Float[Array, "kv_heads head_dim tokens"],
    rows: int,
) -> LayerCache:
    """The keys and values of rows of tokens that were read end to end."""

    def apart(part: Array) -> Array:
        return part.reshape(*part.shape[:2], rows, -1).transpose(2, 0, 1, 3)

    return LayerCache(apart(keys), apart(values).swapaxes(2, 3))


def fill(
    cache: LayerCache, read: LayerCache, slot: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""]
) -> LayerCache:
    """Copies the prompt that begins at `start` of row `row` to the front of slot `slot`; all of the slot is written.

    What follows the prompt is what follows it in its row, then zeros. It must be finite: attention gives what lies beyond a
    slot's length no weight, but 0 x NaN is NaN.
    """

    keys = front_of_slot(cache.keys, read.keys, slot, row, start, axis=3)
    return LayerCache(keys, front_of_slot(cache.values, read.values, slot, row, start, axis=2))


def front_of_slot(
    into: Float[Array, "slots kv_heads _ _"],
    source: Float[Array, "rows kv_heads _ _"],
    slot: Int[Array, ""],
    row: Int[Array, ""],
    start: Int[Array, ""],
    *,
    axis: int,
) -> Float[Array, "slots kv_heads _ _"]:
    """`into` with a row of `source`, from `start` on and then around, at the front of a slot; `axis` is that of the tokens."""
    width = source.shape[axis]
    taken = lax.dynamic_index_in_dim(source, row, keepdims=True)
    # Twice in a row, so that a slice of the full width can begin anywhere.
    taken = lax.dynamic_slice_in_dim(jnp.concatenate([taken, taken], axis), start, width, axis)
    padding = [(0, 0)] * taken.ndim
    padding[axis] = (0, into.shape[axis] - width)
    return lax.dynamic_update_slice_in_dim(into, jnp.pad(taken, padding), slot, axis=0)


def append(
    cache: LayerCache,
    key: Float[Array, "kv_heads head_dim slots"],
    value: Float[Array, "kv_heads head_dim slots"],
    lengths: Int[Array, " slots"],
) -> LayerCache:
    """Writes one token per slot behind the `lengths` tokens that are there."""

    def write(into: Array, new: Array, axis: int) -> Array:
        def one_slot(into: Array, new: Array, at: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(into, jnp.expand_dims(new, axis), at, axis)

        return jax.vmap(one_slot, in_axes=(0, -1, 0))(into, new.astype(into.dtype), lengths)

    return LayerCache(write(cache.keys, key, 2), write(cache.values, value, 1))


def attend(
    cache: LayerCache, query: Float[Array, "heads head_dim slots"], lengths: Int[Array, " slots"]
) -> Float[Array, "heads head_dim slots"]:
    """Attention of one query per slot over the first `lengths` tokens of the slot."""
    return cached_attention(query, cache.keys, cache.values, lengths)


def extend(
    cache: LayerCache,
    query: Float[Array, "heads head_dim slots"],
    key: Float[Array, "kv_heads head_dim slots"],
    value: Float[Array, "kv_heads head_dim slots"],
    lengths: Int[Array, " slots"],
    live: Bool[Array, " slots"],
) -> tuple[Float[Array, "heads head_dim slots"], LayerCache]:
    """Appends a token to each slot's `lengths`; its query attends to them and to itself, or to nothing where the slot is not live."""
    grown = append(cache, key, value, lengths)
    return attend(grown, query, (lengths + 1) * live.astype(jnp.int32)), grown


DENSE = Cache(empty=empty, of_rows=of_rows, fill=fill, extend=extend)
