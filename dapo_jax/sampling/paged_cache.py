"""A paged KV cache built from XLA operations that all platforms support. Each row of the page table lists the pages of one slot's tokens.

Pages are created and filled as in `cache`; only append and attention differ. A step reads the first page of all slots, then the second page of all slots that
have one, and so on. Slots are sorted by length, so groups of slots without such a page are skipped. Each slot reads its own pages in order, so its result
does not depend on other slots, not even in the last bit.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from dapo_jax.models.attention import MASKED, Sinks, before_keys
from dapo_jax.numerics.precision import capped, product
from dapo_jax.sampling.cache import (
    CacheStep,
    LayerCache,
    Live,
    NewHeads,
    Outputs,
    PerSlot,
    Queries,
    Scalar,
    Tables,
    append_to_pages,
    page_of_new,
)

_AT_ONCE = 16
"""Number of slots whose pages are read together. With fewer slots, the loop costs more than the reads; with more slots, the last group is mostly idle."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedStep(CacheStep):
    """Data of a decoding step, with the order in which pages are read. The rows of `tables` are sorted like `order`, and padded to a multiple of the number
    of slots that are read together."""

    order: Int[Array, " padded"] | Any
    """Slot numbers, sorted by decreasing number of tokens, followed by padding."""
    counts: Int[Array, " padded"] | Any
    """Number of tokens in each slot, including the new token, sorted like `order`; 0 if the slot is not live."""
    ends: Int[Array, " table_pages"] | Any
    """Entry i is the number of loop iterations after which page i of every slot has been read."""


def reading(tables: Tables, lengths: PerSlot, live: Live, *, page_tokens: int) -> PagedStep:
    slots, most = tables.shape
    counts = jnp.where(live, lengths + 1, 0)
    order = jnp.argsort(-counts).astype(jnp.int32)
    counts = counts[order]
    filled = (counts + page_tokens - 1) // page_tokens
    at_once = min(_AT_ONCE, slots)
    reaching = (filled[None] > jnp.arange(most, dtype=jnp.int32)[:, None]).sum(-1, dtype=jnp.int32)
    extra = (0, -slots % at_once)
    return PagedStep(
        lengths=lengths,
        live=live,
        tables=jnp.pad(tables[order], (extra, (0, 0))),
        order=jnp.pad(order, extra),
        counts=jnp.pad(counts, extra),
        ends=jnp.cumsum((reaching + at_once - 1) // at_once, dtype=jnp.int32),
        page=page_of_new(tables, lengths, live, page_tokens=page_tokens),
    )


def extend(
    cache: LayerCache,
    now: PagedStep,
    query: Queries,
    key: NewHeads,
    value: NewHeads | None,
    sinks: Sinks = None,
    *,
    dtype: str,
    window: int = 0,
    cap: float | None = None,
    value_dim: int | None = None,
    appends: bool = True,
) -> tuple[Outputs, LayerCache]:
    """Implements `cache.extend`, but slots that are not live get no token, and their attention output is 0. Products are computed in `dtype`.

    Page entries after a slot's last token are masked, so a NaN that the page's previous owner left there has no effect. Pages before a window are read and masked.
    """
    if appends:
        cache = append_to_pages(cache, now.page, now.lengths, key, value)
    heads, head_dim, slots = query.shape
    kv_heads, page_tokens = cache.keys.shape[1], cache.keys.shape[3]
    value_scales = cache.key_scales if cache.values is None else cache.value_scales
    at_once = min(_AT_ONCE, slots)
    grouped = (query * head_dim**-0.5).reshape(kv_heads, heads // kv_heads, head_dim, slots)
    grouped = grouped.transpose(3, 0, 1, 2)[now.order]

    def add_pages(step: Scalar, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        column = jnp.searchsorted(now.ends, step, side="right").astype(jnp.int32)
        first = (step - jnp.where(column > 0, now.ends[column - 1], 0)) * at_once

        def some(whole: Array) -> Array:
            return lax.dynamic_slice_in_dim(whole, first, at_once)

        pages = lax.dynamic_slice(now.tables, (first, column), (at_once, 1))[:, 0]
        top, total, out = map(some, carry)
        position = column * page_tokens + jnp.arange(page_tokens, dtype=jnp.int32)
        filled = position[None] < some(now.counts)[:, None]
        if window:
            filled &= position[None] >= some(now.counts)[:, None] - window
        keys = cache.keys[pages]
        values = keys[:, :, :value_dim].swapaxes(2, 3) if cache.values is None else cache.values[pages]
        values = jnp.where(filled[:, None, :, None], values, 0)
        scores = product("skdc,skgd->skgc", keys, some(grouped), dtype)
        if cache.key_scales is not None:
            scores = scores * cache.key_scales[pages][:, :, None]
        scores = capped(scores, cap)
        scores = jnp.where(filled[:, None, None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(filled[:, None, None], jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(-1)
        if value_scales is not None:
            weights = jnp.where(filled[:, None, None], weights * value_scales[pages][:, :, None], 0.0)
        out = out * shrink[..., None] + product("skcd,skgc->skgd", values, weights, dtype)

        def put(whole: Array, some: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(whole, some, first, 0)

        return put(carry[0], new_top), put(carry[1], total), put(carry[2], out)

    shape = grouped.shape[:-1]
    begin = None if sinks is None else sinks.reshape(shape[1:])
    carry = (*before_keys(shape, begin), jnp.zeros((*shape, value_dim or head_dim)))
    _, total, out = lax.fori_loop(0, now.ends[-1], add_pages, carry)
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    back = jnp.zeros_like(out[:slots]).at[now.order[:slots]].set(out[:slots], unique_indices=True)
    return back.transpose(1, 2, 3, 0).reshape(heads, -1, slots).astype(query.dtype), cache
