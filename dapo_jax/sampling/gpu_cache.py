"""The paged KV cache on NVIDIA GPUs: attention by jax's own kernel for pages (Pallas, Triton).

The kernel would return NaN if a page held a NaN after a slot's tokens, since 0 x NaN is NaN. So NaN in keys and values is written as 0.
It is noticed all the same: the logits of its own token are NaN.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from dapo_jax.sampling.cache import EIGHT_BITS, fill_page, of_row, page_of_new, put_new, stored

SMALLEST_PAGE = 16
"""Tokens; the kernel's blocks are powers of two, at least this."""

_BLOCK_TOKENS = 128
"""Pages read at a time."""

_PART_TOKENS = 2048
"""A longer sequence is read in parallel parts, so that a few long ones still fill the device."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """One layer's keys and values."""

    keys: Num[Array, "pages kv_heads page_tokens head_dim"] | Any
    values: Num[Array, "pages kv_heads page_tokens head_dim"] | Any
    key_scales: Float[Array, "pages kv_heads page_tokens"] | Any = None
    """The scales of `cache.LayerCache`."""
    value_scales: Float[Array, "pages kv_heads page_tokens"] | Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuStep:
    """The state of all slots at one decoding step, equal in all layers."""

    tables: Int[Array, "slots table_pages"] | Any
    lengths: Int[Array, " slots"] | Any
    """Number of tokens in the cache; 0 if the slot is not live."""
    live: Bool[Array, " slots"] | Any
    page: Int[Array, " slots"] | Any
    """Page of each slot's new token; beyond all pages if it is not live."""


def kernel() -> Any:
    """Returns jax's kernel, or None if this jax has none: it has announced that it will drop it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    except ImportError:
        return None
    return paged_attention


def empty(pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: str) -> Pool:
    """Returns an empty cache."""
    whole, scales = jnp.zeros((pages, kv_heads, page_tokens, head_dim), dtype), None
    if dtype in EIGHT_BITS:
        scales = jnp.zeros((pages, kv_heads, page_tokens), jnp.float32)
    return Pool(whole, whole, scales, scales)


def of_rows(
    keys: Float[Array, "kv_heads head_dim tokens"],
    values: Float[Array, "kv_heads head_dim tokens"],
    rows: int,
    dtype: str,
) -> Pool:
    """Returns the keys and values of prefilled rows, given end to end."""
    (keys, key_scales), (values, value_scales) = (
        stored(jnp.nan_to_num(part), dtype) for part in (keys, values)
    )
    return Pool(
        of_row(keys, rows).swapaxes(2, 3), of_row(values, rows).swapaxes(2, 3), of_row(key_scales, rows), of_row(value_scales, rows)
    )  # fmt: skip


def fill(cache: Pool, read: Pool, page: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""]) -> Pool:
    """Implements `cache.fill`: copies the tokens of row `row` from `start` on into a page."""

    def filled(name: str) -> Any:
        return fill_page(getattr(cache, name), getattr(read, name), page, row, start, axis=2)

    return Pool(*map(filled, ("keys", "values", "key_scales", "value_scales")))


def reading(
    tables: Int[Array, "slots table_pages"],
    lengths: Int[Array, " slots"],
    live: Bool[Array, " slots"],
    *,
    page_tokens: int,
) -> GpuStep:
    """Returns a step in the form that the kernel reads."""
    page = page_of_new(tables, lengths, live, page_tokens=page_tokens)
    return GpuStep(tables, jnp.where(live, lengths, 0), live, page)


def extend(
    cache: Pool,
    now: GpuStep,
    query: Float[Array, "heads head_dim slots"],
    key: Float[Array, "kv_heads head_dim slots"],
    value: Float[Array, "kv_heads head_dim slots"],
    *,
    dtype: str,
    interpret: bool = False,
) -> tuple[Float[Array, "heads head_dim slots"], Pool]:
    """Implements `paged_cache.extend`. Products are in `dtype` with sums in float32."""
    (pages, kv_heads, page_tokens, head_dim), slots = cache.keys.shape, len(now.live)
    at = (now.page, slice(None), now.lengths % page_tokens)

    (key, key_scale), (value, value_scale) = (
        stored(jnp.nan_to_num(part), cache.keys.dtype.name) for part in (key, value)
    )
    grown = Pool(
        put_new(cache.keys, key, at), put_new(cache.values, value, at),
        put_new(cache.key_scales, key_scale, at), put_new(cache.value_scales, value_scale, at),
    )  # fmt: skip
    # Every key head of a slot is a sequence of its own, and every page holds one head, so the heads need not come first in memory.
    at_once, parts, tables = _parts(now.tables, page_tokens)
    head = jnp.arange(kv_heads, dtype=jnp.int32)
    tables = (tables[:, None] * kv_heads + head[None, :, None]).reshape(slots * kv_heads, -1)

    def of_all_heads(part: Any) -> Any:
        return None if part is None else part.reshape(1, pages * kv_heads, *part.shape[2:])

    scaled = (query * head_dim**-0.5).reshape(kv_heads, -1, head_dim, slots).transpose(3, 0, 1, 2)
    attention = kernel()
    assert attention is not None, "`caches.kind_for` has looked"
    attended = attention(
        scaled.reshape(slots * kv_heads, -1, head_dim).astype(dtype),
        of_all_heads(grown.keys),
        of_all_heads(grown.values),
        tables,
        jnp.repeat(jnp.where(now.live, now.lengths + 1, 0), kv_heads),
        of_all_heads(grown.key_scales),
        of_all_heads(grown.value_scales),
        pages_per_compute_block=at_once,
        k_splits=parts,
        interpret=interpret,
    ).reshape(slots, kv_heads, -1, head_dim)
    attended = jnp.where(now.live[:, None, None, None], attended, 0)
    return attended.transpose(1, 2, 3, 0).reshape(query.shape).astype(query.dtype), grown


def _parts(tables: Int[Array, "slots table_pages"], page_tokens: int) -> tuple[int, int, Array]:
    """Returns the pages read at a time, the parallel parts of a sequence, and the tables padded to a multiple of both."""
    at_once = max(1, _BLOCK_TOKENS // page_tokens)
    each = max(1, _PART_TOKENS // page_tokens // at_once) * at_once
    parts = -(-tables.shape[1] // each)
    if parts == 1:
        each = -(-tables.shape[1] // at_once) * at_once
    return at_once, parts, jnp.pad(tables, ((0, 0), (0, parts * each - tables.shape[1])))
