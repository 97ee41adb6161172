"""KV cache of the decoding slots: the `Cache` interface, and a dense implementation for CPU in which each slot is one page.

`caches` chooses between this implementation, `paged_cache`, `tpu_cache` and `gpu_cache`. The axis orders in `LayerCache` let both matrix products of attention
read contiguous memory. On CPU, attention was 12 times slower with the axis order [slots, capacity, kv_heads, head_dim], and the scores took twice as long to
compute if head_dim was the last axis of the keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from dapo_jax.models.attention import Sinks, cached_attention

Scalar = Int[Array, ""]
Tables = Int[Array, "slots table_pages"]
PerSlot = Int[Array, " slots"]
Live = Bool[Array, " slots"]
Queries = Float[Array, "heads head_dim slots"]
Outputs = Float[Array, "heads value_dim slots"]
NewHeads = Float[Array, "kv_heads head_dim slots"]
"""Keys or values of one new token for each slot."""
RowHeads = Float[Array, "kv_heads head_dim tokens"]
"""Keys or values of prefilled rows, concatenated along the token axis."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The functions that implement one kind of KV cache. This module documents each function. The types of the cache and of a decoding step's data depend on
    the implementation."""

    empty: Callable[..., Any]
    of_rows: Callable[..., Any]
    fill: Callable[..., Any]
    reading: Callable[..., Any]
    extend: Callable[..., tuple[Array, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The cached keys and values of one layer."""

    keys: Num[Array, "pages kv_heads head_dim page_tokens"] | Any
    """In `gpu_cache`, the shape is [pages, kv_heads, page_tokens, head_dim]."""
    values: Num[Array, "pages kv_heads page_tokens head_dim"] | Any
    """None if the values are a part of the keys (`Paged.value_dim`)."""
    key_scales: Float[Array, "pages kv_heads page_tokens"] | Any = None
    """Scale of each token's key if the cache is 8-bit, else None."""
    value_scales: Float[Array, "pages kv_heads page_tokens"] | Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheStep:
    """Data of one decoding step, shared by all layers. `paged_cache` and `tpu_cache` add the order in which pages are read."""

    tables: Tables | Any
    lengths: PerSlot | Any
    """Number of cached tokens in each slot, excluding the new token."""
    live: Live | Any
    page: PerSlot | Any
    """The page that receives each slot's new token, from `page_of_new`; () in a cache that does not use it."""


EIGHT_BITS = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Maps each 8-bit dtype to the largest number that it can represent. In these dtypes, the cache stores a scale per token and head."""


def stored(x: Float[Array, "kv_heads head_dim *tokens"] | None, dtype: str) -> tuple[Any, Any]:
    """Converts keys or values to the cache's dtype. Also returns their scales [kv_heads, *tokens] if the dtype is 8-bit, else None. If `x` is missing, returns None twice."""
    if x is None or dtype not in EIGHT_BITS:
        return None if x is None else x.astype(dtype), None
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(1)
    scale = jnp.where(largest > 0, largest, 1.0) / EIGHT_BITS[dtype]
    scaled = x / scale[:, None]
    return (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype), scale


def empty(
    pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: str, *, value_dim: int | None = None
) -> LayerCache:
    """Returns the cache of one layer, filled with zeros. If `value_dim` is given, only keys are stored (see `Paged`)."""
    keys, scales = jnp.zeros((pages, kv_heads, head_dim, page_tokens), dtype), None
    if dtype in EIGHT_BITS:
        scales = jnp.zeros((pages, kv_heads, page_tokens), jnp.float32)
    if value_dim is not None:
        return LayerCache(keys, None, scales)
    return LayerCache(keys, keys.swapaxes(2, 3), scales, scales)


def of_rows(keys: RowHeads, values: RowHeads | None, rows: int, dtype: str) -> LayerCache:
    """Converts keys and values of prefilled rows, concatenated along the token axis, to the cache layout."""
    (keys, key_scales), (values, value_scales) = stored(keys, dtype), stored(values, dtype)
    values = None if values is None else of_row(values, rows).swapaxes(2, 3)
    return LayerCache(of_row(keys, rows), values, of_row(key_scales, rows), of_row(value_scales, rows))


def of_row(part: Any, rows: int) -> Any:
    """Reshapes concatenated rows [kv_heads, ..., tokens] to [rows, kv_heads, ..., tokens per row]. If `part` is missing, returns None."""
    if part is None:
        return None
    return jnp.moveaxis(part.reshape(*part.shape[:-1], rows, -1), -2, 0)


def fill(
    cache: LayerCache, read: LayerCache, page: Scalar, row: Scalar, start: Scalar, *, keys_axis: int = 3
) -> LayerCache:  # fmt: skip
    """Copies tokens from row `row` of `read`, starting at index `start`, into page `page` of `cache`. The whole page is written, with zeros after the end of
    the row. `keys_axis` is the token axis of the keys."""
    axes = {"keys": keys_axis, "values": 2, "key_scales": 2, "value_scales": 2}
    return LayerCache(**{
        name: fill_page(getattr(cache, name), getattr(read, name), page, row, start, axis=axis)
        for name, axis in axes.items()
    })  # fmt: skip


def fill_page(into: Any, source: Any, page: Scalar, row: Scalar, start: Scalar, *, axis: int) -> Any:
    """Returns `into` [pages, kv_heads, ...] with one page replaced by tokens from row `row` of `source` [rows, kv_heads, ...], starting at index `start`.
    `axis` is the token axis. If `into` is missing, returns None."""
    if into is None:
        return None
    tokens = into.shape[axis]
    tokens_of_row = lax.dynamic_index_in_dim(source, row, keepdims=True)
    padding = [(0, 0)] * tokens_of_row.ndim
    padding[axis] = (0, tokens)
    tokens_of_row = lax.dynamic_slice_in_dim(jnp.pad(tokens_of_row, padding), start, tokens, axis)
    return lax.dynamic_update_slice_in_dim(into, tokens_of_row, page, axis=0)


def page_of_new(tables: Tables, lengths: PerSlot, live: Live, *, page_tokens: int) -> PerSlot:
    """Returns the page that receives each slot's new token. Slots that are not live get out-of-range page numbers. No two slots get the same number."""
    page = jnp.take_along_axis(tables, lengths[:, None] // page_tokens, axis=1, mode="clip")[:, 0]
    return jnp.where(live, page, jnp.iinfo(jnp.int32).max - jnp.arange(len(page), dtype=jnp.int32))


def append_to_pages(
    cache: LayerCache, page: PerSlot, lengths: PerSlot, key: NewHeads, value: NewHeads | None
) -> LayerCache:
    """Appends one token to each slot, after its `lengths` tokens. `page` is the result of `page_of_new`. Tokens for out-of-range pages are dropped."""
    dtype, offset = cache.keys.dtype.name, lengths % cache.keys.shape[3]
    (key, key_scale), (value, value_scale) = stored(key, dtype), stored(value, dtype)

    def put(into: Any, new: Any, *before: slice) -> Any:
        if into is None:
            return None
        at = page, slice(None), *before, offset
        return into.at[at].set(jnp.moveaxis(new, -1, 0), mode="drop", unique_indices=True)

    keys, values = put(cache.keys, key, slice(None)), put(cache.values, value)
    return LayerCache(keys, values, put(cache.key_scales, key_scale), put(cache.value_scales, value_scale))


def extend(
    cache: LayerCache,
    now: CacheStep,
    query: Queries,
    key: NewHeads,
    value: NewHeads | None,
    sinks: Sinks = None,
    *,
    window: int = 0,
    cap: float | None = None,
    value_dim: int | None = None,
    appends: bool = True,
) -> tuple[Outputs, LayerCache]:
    """Appends one token to each slot and computes attention. The query of a live slot attends to all of its tokens, including the new one, or to the last
    `window` tokens if it is above 0. `cap` caps the scores (see `dapo_jax.numerics.precision.capped`). `sinks` are as in `dapo_jax.models.attention`.
    If `value_dim` is given, there are no values (see `Paged`). If `appends` is False, the cache already has the token, because a layer before this one appended it."""

    def append(into: Any, new: Any, axis: int) -> Any:
        if into is None:
            return None

        def one_slot(into: Array, new: Array, at: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(into, jnp.expand_dims(new, axis), at, axis)

        return jax.vmap(one_slot, in_axes=(0, -1, 0))(into, new.astype(into.dtype), now.lengths)

    if appends:
        cache = LayerCache(append(cache.keys, key, 2), append(cache.values, value, 1))
    counts = (now.lengths + 1) * now.live.astype(jnp.int32)
    how: dict[str, Any] = {"window": window, "cap": cap, "sinks": sinks, "value_dim": value_dim}
    return cached_attention(query, cache.keys, cache.values, counts, **how), cache


DENSE = Cache(empty=empty, of_rows=of_rows, fill=fill, reading=partial(CacheStep, page=()), extend=extend)
