"""The KV cache of the decoding slots: the interface `Cache`, and its plain form, in which each slot is one page.

The plain form is for CPU. The others are `paged_cache`, `tpu_cache` and `gpu_cache`; `caches` chooses. Both products of attention read
the axes row by row in this order: over [slots, capacity, kv_heads, head_dim] attention was 12 times slower on CPU, and scores
over keys with head_dim last 2 times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from dapo_jax.models.attention import cached_attention


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The functions of one kind of KV cache, each documented in this file. The types that they pass to each other belong to the kind."""

    empty: Callable[..., Any]
    of_rows: Callable[..., Any]
    fill: Callable[..., Any]
    reading: Callable[..., Any]
    extend: Callable[..., tuple[Array, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values."""

    keys: Num[Array, "pages kv_heads head_dim page_tokens"] | Any
    values: Num[Array, "pages kv_heads page_tokens head_dim"] | Any
    key_scales: Float[Array, "pages kv_heads page_tokens"] | Any = None
    """Scale of each token's key if keys have eight bits; else None."""
    value_scales: Float[Array, "pages kv_heads page_tokens"] | Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseStep:
    """The state of all slots at one decoding step, equal in all layers."""

    lengths: Int[Array, " slots"] | Any
    live: Bool[Array, " slots"] | Any


EIGHT_BITS = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Dtypes with a scale for each token and head, and the largest number of each."""


def stored(
    x: Float[Array, "kv_heads head_dim *tokens"], dtype: str
) -> tuple[Num[Array, "kv_heads head_dim *tokens"], Any]:
    """Returns keys or values in the cache's dtype, and their scales [kv_heads, ...] (None unless the dtype has eight bits)."""
    if dtype not in EIGHT_BITS:
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(1)
    scale = jnp.where(largest > 0, largest, 1.0) / EIGHT_BITS[dtype]
    scaled = x / scale[:, None]
    return (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype), scale


def empty(pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: str) -> LayerCache:
    """Returns an empty cache."""
    keys, scales = jnp.zeros((pages, kv_heads, head_dim, page_tokens), dtype), None
    if dtype in EIGHT_BITS:
        scales = jnp.zeros((pages, kv_heads, page_tokens), jnp.float32)
    return LayerCache(keys, keys.swapaxes(2, 3), scales, scales)


def of_rows(
    keys: Float[Array, "kv_heads head_dim tokens"],
    values: Float[Array, "kv_heads head_dim tokens"],
    rows: int,
    dtype: str,
) -> LayerCache:
    """Returns the keys and values of prefilled rows, given end to end."""
    (keys, key_scales), (values, value_scales) = stored(keys, dtype), stored(values, dtype)
    return LayerCache(
        of_row(keys, rows), of_row(values, rows).swapaxes(2, 3), of_row(key_scales, rows), of_row(value_scales, rows)
    )  # fmt: skip


def of_row(part: Any, rows: int) -> Any:
    """Reshapes [kv_heads, ..., tokens] of rows end to end into [rows, kv_heads, ..., row tokens]. None stays None."""
    if part is None:
        return None
    return jnp.moveaxis(part.reshape(*part.shape[:-1], rows, -1), -2, 0)


def fill(
    cache: LayerCache, read: LayerCache, page: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""]
) -> LayerCache:
    """Copies the tokens of row `row` from `start` on into a page. All of the page is written, with zeros after the row's end."""

    def filled(into: Any, source: Any, axis: int) -> Any:
        return fill_page(into, source, page, row, start, axis=axis)

    return LayerCache(
        filled(cache.keys, read.keys, 3),
        filled(cache.values, read.values, 2),
        filled(cache.key_scales, read.key_scales, 2),
        filled(cache.value_scales, read.value_scales, 2),
    )


def fill_page(
    into: Any, source: Any, page: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""], *, axis: int
) -> Any:
    """Returns `into` [pages, kv_heads, ...] with a page replaced by a row of `source` [rows, kv_heads, ...] from `start` on. `axis` is the
    tokens' axis.
    None stays None.
    """
    if into is None:
        return None
    tokens = into.shape[axis]
    taken = lax.dynamic_index_in_dim(source, row, keepdims=True)
    padding = [(0, 0)] * taken.ndim
    padding[axis] = (0, tokens)
    taken = lax.dynamic_slice_in_dim(jnp.pad(taken, padding), start, tokens, axis)
    return lax.dynamic_update_slice_in_dim(into, taken, page, axis=0)


def reading(
    tables: Int[Array, "slots table_pages"], lengths: Int[Array, " slots"], live: Bool[Array, " slots"]
) -> DenseStep:
    """Returns the part of a step that all layers share. Each slot is its own page here, so `tables` is not used."""
    return DenseStep(lengths, live)


def page_of_new(
    tables: Int[Array, "slots table_pages"],
    lengths: Int[Array, " slots"],
    live: Bool[Array, " slots"],
    *,
    page_tokens: int,
) -> Int[Array, " slots"]:
    """Returns the page of each slot's new token; for slots that are not live, a number beyond all pages."""
    page = jnp.take_along_axis(tables, lengths[:, None] // page_tokens, axis=1, mode="clip")[:, 0]
    return jnp.where(live, page, jnp.iinfo(jnp.int32).max)


def put_new(into: Any, new: Any, at: tuple[Any, ...]) -> Any:
    """Returns `into` [pages, kv_heads, ...] with one token of each slot, `new` [kv_heads, ..., slots], written at `at`. Places outside are
    dropped. None stays None.
    """
    return None if into is None else into.at[at].set(jnp.moveaxis(new, -1, 0), mode="drop")


def append(
    cache: LayerCache,
    key: Float[Array, "kv_heads head_dim slots"],
    value: Float[Array, "kv_heads head_dim slots"],
    lengths: Int[Array, " slots"],
) -> LayerCache:
    """Writes one token per slot after its `lengths` tokens."""

    def write(into: Array, new: Array, axis: int) -> Array:
        def one_slot(into: Array, new: Array, at: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(into, jnp.expand_dims(new, axis), at, axis)

        return jax.vmap(one_slot, in_axes=(0, -1, 0))(into, new.astype(into.dtype), lengths)

    return LayerCache(write(cache.keys, key, 2), write(cache.values, value, 1))


def attend(
    cache: LayerCache, query: Float[Array, "heads head_dim slots"], lengths: Int[Array, " slots"]
) -> Float[Array, "heads head_dim slots"]:
    """Returns the attention of one query per slot over the slot's first `lengths` tokens."""
    return cached_attention(query, cache.keys, cache.values, lengths)


def extend(
    cache: LayerCache,
    now: DenseStep,
    query: Float[Array, "heads head_dim slots"],
    key: Float[Array, "kv_heads head_dim slots"],
    value: Float[Array, "kv_heads head_dim slots"],
) -> tuple[Float[Array, "heads head_dim slots"], LayerCache]:
    """Appends a token to each slot. Its query attends to the slot's tokens and to itself, or to nothing in a slot that is not live."""
    grown = append(cache, key, value, now.lengths)
    return attend(grown, query, (now.lengths + 1) * now.live.astype(jnp.int32)), grown


DENSE = Cache(empty=empty, of_rows=of_rows, fill=fill, reading=reading, extend=extend)
