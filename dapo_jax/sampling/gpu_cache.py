"""The paged KV cache on NVIDIA GPUs: one kernel appends a token to every live slot and computes attention, like `paged_cache.extend`.

The kernel is written in Pallas, for its Triton backend. A program reads the keys and values of one slot and key head, or one part of them if the sequence is long.
While it computes one block of tokens, it copies the next block from the device's memory. The copy needs the block's page number, so this number is read one block
earlier. Only tokens of the slot inside the window are read. So a page's other tokens have no effect, even if they are NaN.
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from dapo_jax.models.attention import MASKED, Sinks
from dapo_jax.numerics.precision import capped
from dapo_jax.sampling import cache as plain
from dapo_jax.sampling.cache import (
    CacheStep,
    LayerCache,
    Live,
    NewHeads,
    PerSlot,
    Queries,
    RowHeads,
    Scalar,
    Tables,
    stored,
)

SMALLEST_PAGE = 16
"""Minimum number of tokens per page. Triton's products need at least this many rows."""

_BLOCK_BYTES = 1 << 15
"""Maximum size of a block's keys and values. A program has two blocks in shared memory, and copies at least one of them. In bfloat16, three or more programs fit on
a multiprocessor of an H200, so 96 KB or more are in flight there. It needs 22 KB (4.8 TB/s x 600 ns latency / 132 multiprocessors)."""

_PROGRAMS = 512
"""If one program per slot and key head makes fewer programs, sequences are split into parts. A device with 132 multiprocessors runs about this many at a time."""

_SMALLEST_PART, _LARGEST_PART = 256, 2048
"""Minimum number of tokens per part of a sequence, and maximum number in the longest possible sequence. With parts, a few long sequences use the whole device."""

_LOG2_E = 1.4426950408889634  # Triton computes 2^x in one instruction.


def without_kernel(device: Any, dtype: str) -> str:
    """Returns the reason why the kernel cannot be used on this device with a cache of this dtype, or an empty string if it can. JAX has announced that it will
    remove Pallas' Triton backend."""
    if find_spec("jax.experimental.pallas.triton") is None:
        return f"jax {jax.__version__} no longer includes Pallas' Triton backend; an older jax has it"
    # The compute capability of an AMD GPU is a name, not a number.
    capability = getattr(device, "compute_capability", "")
    if dtype.startswith("float8") and capability[:1].isdigit() and float(capability) < 8.9:
        return f"Triton supports {dtype} on GPUs of compute capability 8.9 or newer, and this GPU has {capability}; sampling.cache_dtype=int8 has a kernel"
    return ""


def empty(pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: str) -> LayerCache:
    cache = plain.empty(pages, kv_heads, page_tokens, head_dim, dtype)
    return replace(cache, keys=cache.values)


def of_rows(keys: RowHeads, values: RowHeads, rows: int, dtype: str) -> LayerCache:
    cache = plain.of_rows(keys, values, rows, dtype)
    return replace(cache, keys=cache.keys.swapaxes(2, 3))


fill = partial(plain.fill, keys_axis=2)


def reading(tables: Tables, lengths: PerSlot, live: Live, *, page_tokens: int) -> CacheStep:
    """Returns the data of a decoding step, in which `lengths` is -1 for slots that are not live."""
    return CacheStep(tables, jnp.where(live, lengths, -1), live, ())


def extend(
    cache: LayerCache,
    now: CacheStep,
    query: Queries,
    key: NewHeads,
    value: NewHeads,
    sinks: Sinks = None,
    *,
    dtype: str,
    window: int = 0,
    cap: float | None = None,
    appends: bool = True,
    interpret: bool = False,
) -> tuple[Queries, LayerCache]:
    """Implements `paged_cache.extend`. Tokens before a window are not read. Products are computed in `dtype` and summed in float32. Raises ValueError if
    Triton's code cannot address the keys of an 8-bit cache, because Pallas computes positions in 32 bits with a sign up to a size of 2^32 bytes."""
    from jax.experimental.pallas import triton

    (_, kv_heads, page_tokens, head_dim), slots, kept = cache.keys.shape, len(now.live), cache.keys.dtype
    if kept.itemsize == 1 and 2**31 < cache.keys.size <= 2**32:
        raise ValueError(
            f"the keys of a layer have {cache.keys.size:,} bytes on a device, and the kernel for GPUs can address {2**31:,} in {kept.name}: "
            f"set sampling.cache_tokens to at most {2**31 // (kv_heads * head_dim)} per device of the axes data and fsdp"
        )
    # The new keys and values, and their scales, are one array each, so that XLA computes both in one kernel.
    both = stored(key, kept.name), stored(value, kept.name)
    new = jax.tree.map(lambda *pair: jnp.moveaxis(jnp.stack(pair), -1, 1), *both)
    scaled = (query * head_dim**-0.5).reshape(kv_heads, -1, head_dim, slots).transpose(3, 0, 1, 2)
    width = max(64, pl.next_power_of_2(head_dim))
    block = min(page_tokens, max(SMALLEST_PAGE, _BLOCK_BYTES // (2 * width * kept.itemsize)))
    longest = now.tables.shape[1] * page_tokens
    parts = _parts(min(longest, window or longest), slots * kv_heads)
    arguments = now.tables, now.lengths, scaled.astype(dtype), new, cache
    results = (
        jax.ShapeDtypeStruct((parts, *scaled.shape), dtype if parts == 1 else jnp.float32),
        jax.ShapeDtypeStruct((parts, *scaled.shape[:-1]), jnp.float32),
        jax.tree.map(lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype), cache) if appends else (),
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    pools, grown_pools = len(jax.tree.leaves(cache)), len(jax.tree.leaves(results[2]))
    attended, sizes, grown = pl.pallas_call(
        partial(_kernel, block=block, width=width, window=window, cap=cap),
        grid=(kv_heads, slots, parts),
        in_specs=jax.tree.map(lambda _: anywhere, arguments),
        out_specs=jax.tree.map(lambda _: anywhere, results),
        out_shape=results,
        input_output_aliases={3 + pools // 2 + index: 2 + index for index in range(grown_pools)},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="extend",
    )(*arguments)
    if parts > 1:
        # Parts without tokens have no result.
        shares = jnp.where(sizes > MASKED, jax.nn.softmax(sizes, axis=0), 0.0)[..., None]
        attended = jnp.where(shares > 0, attended * shares, 0.0).sum(0, keepdims=True).astype(dtype)
    if sinks is not None:
        total = jax.nn.logsumexp(sizes, axis=0)
        shares = jax.nn.sigmoid(total - sinks.reshape(total.shape[1:])[None])
        attended = (attended.astype(jnp.float32) * shares[None, ..., None]).astype(dtype)
    return attended[0].transpose(1, 2, 3, 0).reshape(query.shape).astype(query.dtype), grown or cache


def _parts(tokens: int, programs: int) -> int:
    """Returns the number of parts of every sequence. Up to `tokens` tokens of it are read, and with one part each, there would be this number of programs."""
    wanted = max(pl.cdiv(_PROGRAMS, programs), pl.cdiv(tokens, _LARGEST_PART))
    return min(wanted, pl.cdiv(tokens, _SMALLEST_PART))


def _kernel(
    tables: Any, lengths: Any, query: Any, new: Any, cache: Any, attended: Any, sizes: Any, grown: Any, *,
    block: int, width: int, window: int, cap: float | None,
) -> None:  # fmt: skip
    """Computes one part of one slot's attention, for all query heads of one key head.

    `attended` [parts, slots, kv_heads, group, head_dim] receives the result of each part, and `sizes` the logarithm of the sum of its weights. The first part also
    attends to the new token, and writes it to the cache, unless `grown` is (). Triton's arrays have sizes that are powers of two, so they are padded.
    """
    from jax.experimental.pallas.triton import load, store

    pairs, scales = new
    head, slot, part = (pl.program_id(axis) for axis in range(3))
    (parts, *_, group, head_dim), page_tokens, length = attended.shape, cache.keys.shape[2], lengths[slot]
    row, column = jnp.arange(max(16, pl.next_power_of_2(group))), jnp.arange(width)
    grid, inside = (row[:, None], column[None]), column < head_dim
    used = (row < group)[:, None] & inside[None]
    zero = jnp.zeros((), cache.keys.dtype)
    exact = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=exact)

    first_token = jnp.maximum(length + 1 - window, 0) if window else 0
    begin, end = lax.div(first_token, block), lax.div(length + block - 1, block)
    if parts > 1:
        each = pl.cdiv(end - begin, jnp.clip(lax.div((end - begin) * block, _SMALLEST_PART), 1, parts))
        begin = begin + part * each
        end = jnp.minimum(begin + each, end)

    def page_of(step: Scalar) -> Scalar:
        return tables[slot, jnp.minimum(lax.div(step * block, page_tokens), tables.shape[1] - 1)]

    def attend() -> None:
        queries = load(query.at[slot, head, *grid], mask=used, other=0)
        own = [load(pairs.at[which, slot, head, column], mask=inside, other=zero) for which in (0, 1)]

        def add_block(step: Scalar, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            top, total, out, page = carry
            token = jnp.arange(block) + step * block
            place = jnp.arange(block) + lax.rem(step * block, page_tokens)
            seen = (token < length) & (token >= first_token) if window else token < length
            there, whole = (page, head, place[:, None], column[None]), seen[:, None] & inside[None]
            keys, values = (load(x.at[there], mask=whole, other=zero) for x in (cache.keys, cache.values))
            scores = product("gd,td->gt", queries, keys.astype(queries.dtype))
            if cache.key_scales is not None:
                scores = scores * load(cache.key_scales.at[page, head, place], mask=seen, other=0.0)[None]
            scores = jnp.where(seen[None], capped(scores, cap), MASKED)
            peak = jnp.maximum(top, scores.max(1))
            weights, shrink = jnp.exp2(_LOG2_E * (scores - peak[:, None])), jnp.exp2(_LOG2_E * (top - peak))
            total = total * shrink + weights.sum(1)
            if cache.value_scales is not None:
                weights = weights * load(cache.value_scales.at[page, head, place], mask=seen, other=0.0)[None]
            added = product("gt,td->gd", weights.astype(queries.dtype), values.astype(queries.dtype))
            return peak, total, out * shrink[:, None] + added, page_of(step + 1)

        nothing = jnp.full(row.shape, MASKED), jnp.zeros(row.shape), jnp.zeros(used.shape)
        top, total, out, _ = lax.fori_loop(begin, end, add_block, (*nothing, page_of(begin)))
        owns = (part == 0) & (length >= 0)
        own_key, own_value = (x.astype(jnp.float32) for x in own)
        if scales is not None:
            own_key, own_value = own_key * scales[0, slot, head], own_value * scales[1, slot, head]
        score = capped((queries.astype(jnp.float32) * own_key[None]).sum(1), cap)
        peak = jnp.where(owns, jnp.maximum(top, score), top)
        shrink, weight = jnp.exp2(_LOG2_E * (top - peak)), jnp.exp2(_LOG2_E * (score - peak))
        total = jnp.maximum(total * shrink + jnp.where(owns, weight, 0.0), jnp.finfo(jnp.float32).tiny)
        out = out * shrink[:, None] + jnp.where(owns, weight[:, None] * own_value[None], 0.0)
        store(attended.at[part, slot, head, *grid], (out / total[:, None]).astype(attended.dtype), mask=used)
        store(sizes.at[part, slot, head, row], peak + jnp.log(total), mask=row < group)
        if grown == ():
            return
        page, place = page_of(lax.div(length, block)), lax.rem(length, page_tokens)
        for x, pool in zip(own, (grown.keys, grown.values), strict=True):
            store(pool.at[page, head, place, column], x, mask=inside & owns)
        for which, pool in enumerate((grown.key_scales, grown.value_scales)):
            if scales is not None:
                store(pool.at[page, head, place], scales[which, slot, head], mask=owns)

    if parts == 1:
        attend()
    else:
        none = jnp.full(row.shape, MASKED)
        pl.when((part == 0) | (begin < end))(attend)
        pl.when((part > 0) & (begin >= end))(
            lambda: store(sizes.at[part, slot, head, row], none, mask=row < group)
        )
