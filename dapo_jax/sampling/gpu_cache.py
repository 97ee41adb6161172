"""The paged KV cache on NVIDIA GPUs, with JAX's own kernel for paged attention (Pallas, Triton).

The kernel would return NaN if a page contained a NaN after a slot's tokens, because 0 x NaN is NaN. So NaNs in keys and values are stored as 0. Such a
NaN is still noticed, because the logits of the same token are also NaN.
"""

import functools
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh
from jaxtyping import Array

from dapo_jax.sampling import cache as plain
from dapo_jax.sampling.cache import (
    CacheStep,
    LayerCache,
    Live,
    NewHeads,
    PerSlot,
    Queries,
    RowHeads,
    Tables,
    append_to_pages,
    page_of_new,
)

SMALLEST_PAGE = 16
"""Minimum number of tokens per page. The kernel's block sizes are powers of two and at least this large."""

_BLOCK_TOKENS = 128
"""Number of tokens that the kernel reads at a time, in whole pages. If a page is larger, the kernel reads one page at a time."""

_PART_TOKENS = 2048
"""Maximum number of tokens per part of a sequence. Parts are read in parallel, so that a few long sequences still use the whole device."""


def kernel() -> Any:
    """Returns JAX's paged-attention kernel, or None if this JAX version does not include it. JAX has announced that it will remove the kernel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    except ImportError:
        return None
    return paged_attention


@functools.cache
def _lowers(attention: Any) -> bool:
    """Returns whether this JAX version can lower the kernel `attention` for GPUs. No GPU has to be present."""
    struct, h100 = jax.ShapeDtypeStruct, AbstractDevice("NVIDIA H100 80GB HBM3", None, platform="gpu")
    query, lengths = struct((1, 1, 64), jnp.bfloat16), struct((1,), jnp.int32)
    pages, table = struct((1, 1, SMALLEST_PAGE, 64), jnp.bfloat16), struct((1, 1), jnp.int32)
    try:
        with (
            jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=h100)),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", DeprecationWarning)
            small = jax.jit(partial(attention, k_splits=1)).trace(query, pages, pages, table, lengths)
            small.lower(lowering_platforms=("cuda",))
    except Exception:  # any error, because the type depends on how JAX removes the kernel
        return False
    return True


def without_kernel(head_dim: int, dtype: str) -> str:
    """Returns the reason why the kernel cannot be used with a cache of this dtype, or an empty string if it can."""
    # Measured on one H100 80GB, jax 0.11.2: bfloat16 is wrong for head_dim 8 and 16 and correct for 64; float32 is correct for 32, up to TF32.
    least = 32 if dtype == "float32" else 64
    if head_dim < least:
        return f"jax's kernel for a paged KV cache needs head_dim of at least {least} in {dtype}, and the model has {head_dim}"
    if (attention := kernel()) is None or not _lowers(attention):
        return f"jax {jax.__version__} no longer includes a kernel for a paged KV cache; an older jax has it"
    return ""


def empty(pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: str) -> LayerCache:
    made = plain.empty(pages, kv_heads, page_tokens, head_dim, dtype)
    return replace(made, keys=made.values)


def of_rows(keys: RowHeads, values: RowHeads, rows: int, dtype: str) -> LayerCache:
    made = plain.of_rows(jnp.nan_to_num(keys), jnp.nan_to_num(values), rows, dtype)
    return replace(made, keys=made.keys.swapaxes(2, 3))


fill = partial(plain.fill, keys_axis=2)


def reading(tables: Tables, lengths: PerSlot, live: Live, *, page_tokens: int) -> CacheStep:
    """Returns the data of a decoding step, in which `lengths` is 0 for slots that are not live."""
    page = page_of_new(tables, lengths, live, page_tokens=page_tokens)
    return CacheStep(tables, jnp.where(live, lengths, 0), live, page)


def extend(
    cache: LayerCache,
    now: CacheStep,
    query: Queries,
    key: NewHeads,
    value: NewHeads,
    *,
    dtype: str,
    interpret: bool = False,
) -> tuple[Queries, LayerCache]:
    """Implements `paged_cache.extend`. Products are computed in `dtype` and summed in float32."""
    (pages, kv_heads, page_tokens, head_dim), slots = cache.keys.shape, len(now.live)
    new = jnp.nan_to_num(key), jnp.nan_to_num(value)
    grown = append_to_pages(cache, now.page, now.lengths, *new, keys_axis=2)
    # Each key head of a slot is passed as a separate sequence with its own pages, so that the head axis need not come first in memory.
    at_once, parts, tables = _parts(now.tables, page_tokens)
    head = jnp.arange(kv_heads, dtype=jnp.int32)
    tables = (tables[:, None] * kv_heads + head[None, :, None]).reshape(slots * kv_heads, -1)

    def of_all_heads(part: Any) -> Any:
        return None if part is None else part.reshape(1, pages * kv_heads, *part.shape[2:])

    scaled = (query * head_dim**-0.5).reshape(kv_heads, -1, head_dim, slots).transpose(3, 0, 1, 2)
    attention = kernel()
    assert attention is not None, "`caches.kind_for` checks that the kernel exists"
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


def _parts(tables: Tables, page_tokens: int) -> tuple[int, int, Array]:
    """Returns the number of pages read at a time, the number of parallel parts of a sequence, and the page tables, padded to parts of equal length."""
    at_once = max(1, _BLOCK_TOKENS // page_tokens)
    each = max(1, _PART_TOKENS // page_tokens // at_once) * at_once
    parts = -(-tables.shape[1] // each)
    if parts == 1:
        each = -(-tables.shape[1] // at_once) * at_once
    return at_once, parts, jnp.pad(tables, ((0, 0), (0, parts * each - tables.shape[1])))
