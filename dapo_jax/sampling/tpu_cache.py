"""The paged KV cache on TPU: one kernel appends a token to every live slot and computes attention, like `paged_cache.extend`.

A token's key and value are stored next to each other, [pages, kv_heads, page_tokens, 2 head_dim]. So one transfer copies both, and heads of size 64 fill the
128 lanes of a register. The Pallas kernel iterates over blocks of filled pages of live slots, so a step reads only the tokens present, not the whole
capacity. While it computes one block, the pages of the next block are transferred. The kernel writes one tile of rows per slot in place, because XLA's own
updates would loop over the slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from dapo_jax.models.attention import MASKED, Sinks
from dapo_jax.numerics.precision import capped
from dapo_jax.sampling.cache import (
    EIGHT_BITS,
    CacheStep,
    Live,
    NewHeads,
    PerSlot,
    Queries,
    RowHeads,
    Scalar,
    Tables,
    fill_page,
    of_row,
    stored,
)

LANES = 128
"""Number of lanes in a register. The page size of an 8-bit cache must be a multiple of this number, because scales are stored along the lanes."""

SCALAR_BYTES = (1 << 20) - (1 << 14)
"""Size of a core's scalar memory (SMEM) on TPU v4 to TPU7x, without 16 KiB for the kernel's own scalars."""

_BLOCK_BYTES = 1 << 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """The cached keys and values of one layer."""

    pairs: Num[Array, "pages kv_heads page_tokens pair"] | Any
    """The key of each token, followed by its value."""
    scales: Float[Array, "pages kv_heads 2 page_tokens"] | Any = None
    """The scales of each token's key and value in an 8-bit cache, else None."""


def tile_rows(dtype: str) -> int:
    """Returns the number of rows that are written together: as many rows as a register of this dtype has. Page sizes must be multiples of this number."""
    return 32 if dtype in EIGHT_BITS else 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TpuStep(CacheStep):
    """Data of a decoding step in the format that the kernel expects."""

    walks: dict[int, tuple[Int[Array, "1"], Int[Array, " most"], PerSlot]] | Any
    """For each window of a layer (0: all tokens), the result of `_walk`."""


def pages_at_once(kv_heads: int, page_tokens: int, head_dim: int, dtype: str) -> int:
    """Returns the number of pages that a kernel step reads on one device: enough to outweigh the overhead of a step, but few enough to fit easily in the
    fast memory of a core."""
    heads = kv_heads // _parts(kv_heads)
    return max(1, _BLOCK_BYTES // (heads * page_tokens * 2 * head_dim * jnp.dtype(dtype).itemsize))


def scalar_bytes(table_pages: int, at_once: int) -> int:
    """Returns the bytes of scalar memory that the kernel needs for a slot: its length, its first step, the slot of each of its steps, and its row of the page
    table. There, a row has a multiple of 128 entries."""
    steps = pl.cdiv(table_pages, min(at_once, table_pages))
    return 4 * (2 + steps + pl.cdiv(table_pages, LANES) * LANES)


def _parts(kv_heads: int) -> int:
    """Returns the number of parts into which the kernel splits the heads. Two parts keep both cores of a two-core chip busy; other chips run them in sequence."""
    return 2 - kv_heads % 2


def empty(pages: int, kv_heads: int, page_tokens: int, head_dim: int, dtype: str) -> Pairs:
    scales = jnp.zeros((pages, kv_heads, 2, page_tokens), jnp.float32) if dtype in EIGHT_BITS else None
    return Pairs(jnp.zeros((pages, kv_heads, page_tokens, 2 * head_dim), dtype), scales)


def of_rows(keys: RowHeads, values: RowHeads, rows: int, dtype: str) -> Pairs:
    pairs, scales = _paired(keys, values, dtype)
    return Pairs(of_row(pairs, rows).swapaxes(2, 3), of_row(scales, rows))


def _paired(key: Array, value: Array, dtype: str) -> tuple[Array, Array | None]:
    """Returns keys and values as [kv_heads, 2 head_dim, tokens], and their scales as [kv_heads, 2, tokens] or None."""
    (key, key_scale), (value, value_scale) = stored(key, dtype), stored(value, dtype)
    scales = None if key_scale is None else jnp.stack([key_scale, value_scale], axis=1)
    return jnp.concatenate([key, value], axis=1), scales


def fill(cache: Pairs, read: Pairs, page: Scalar, row: Scalar, start: Scalar) -> Pairs:
    return Pairs(
        fill_page(cache.pairs, read.pairs, page, row, start, axis=2),
        fill_page(cache.scales, read.scales, page, row, start, axis=3),
    )


def reading(
    tables: Tables, lengths: PerSlot, live: Live, *, page_tokens: int, at_once: int, windows: Sequence[int] = (0,)
) -> TpuStep:  # fmt: skip
    """Returns the data of a decoding step in the kernel's format. `at_once` is the result of `pages_at_once`, and `windows` are the windows of the layers."""
    slots, most = tables.shape
    lengths, at_once = jnp.where(live, lengths, 0), min(at_once, most)
    block, walks = at_once * page_tokens, {}
    for window in sorted(set(windows)):
        blocks = jnp.where(live, lengths // block + 1, 0)
        first = _first_token(lengths, window) // block if window else 0
        count, slot_of, starts = _walk(blocks - first if window else blocks, slots * pl.cdiv(most, at_once))
        walks[window] = count, slot_of, starts - first if window else starts
    return TpuStep(tables, lengths, live, (), walks)


def _first_token(length: Any, window: int) -> Any:
    """Returns the first token of a slot to which a new token after `length` tokens attends."""
    return jnp.maximum(length + 1 - window, 0) if window else 0


def _walk(blocks: PerSlot, most: int) -> tuple[Int[Array, "1"], Int[Array, " most"], PerSlot]:
    """Returns the number of kernel steps, the slot of each step, and each slot's first step. There is one step per block of pages of each live slot
    (including a partly filled block), but at least one in total."""
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    # A slot's steps begin where the previous slot's steps end; a slot without blocks has no steps.
    passed = jnp.cumsum(jnp.zeros(most, jnp.int32).at[ends].add(1, mode="drop"), dtype=jnp.int32)
    return jnp.maximum(ends[-1:], 1), jnp.minimum(passed, len(blocks) - 1), ends - blocks


def extend(
    cache: Pairs,
    now: TpuStep,
    query: Queries,
    key: NewHeads,
    value: NewHeads,
    sinks: Sinks = None,
    *,
    dtype: str,
    window: int = 0,
    cap: float | None = None,
    at_once: int = 0,
    appends: bool = True,
    interpret: bool = False,
) -> tuple[Queries, Pairs]:
    """Implements `paged_cache.extend`. Pages before a window are not read. `at_once` is the argument of `reading`; 0 means the result of `pages_at_once`.

    The running softmax starts from the new token, so it is never empty, and the new token is not read from the cache. Products are computed in `dtype` and
    summed in float32.
    """
    pairs, kv_heads, live = cache.pairs, len(key), now.live
    count, slot_of, starts = now.walks[window]
    slots, kept = len(live), pairs.dtype.name
    page_tokens, width = pairs.shape[2:]
    parts = _parts(kv_heads)
    heads, tile = kv_heads // parts, tile_rows(kept)
    group, head_dim = len(query) // kv_heads, query.shape[1]
    at_once = at_once or pages_at_once(kv_heads, page_tokens, head_dim, kept)
    at_once = min(at_once, now.tables.shape[1])
    block = at_once * page_tokens

    def at_slot(part: Any, step: Any, slot_of: Any, *_: Any) -> tuple[Any, ...]:
        return slot_of[step], part, 0, 0

    def at_new(
        part: Any, step: Any, slot_of: Any, _: Any, lengths: Any, tables: Any, *__: Any, lanes: bool = False
    ) -> tuple[Any, ...]:
        """Returns the index of the block that contains a slot's new token. A block is one tile of the packed keys and values or, with `lanes`, 128 scales."""
        slot = slot_of[step]
        page, offset = tables[slot, lengths[slot] // page_tokens], lengths[slot] % page_tokens
        return (page, part, 0, offset // LANES) if lanes else (page, part, offset // tile, 0)

    new, new_scales = _paired(key, value, kept)
    per_head = (1, heads, group, head_dim)
    pools = [pairs] if cache.scales is None else [pairs, cache.scales]
    news = [new.transpose(2, 0, 1)[:, :, None]]
    new_specs = [pl.BlockSpec((1, heads, 1, width), at_slot)]
    pool_specs = [pl.BlockSpec((1, heads, tile, width), at_new)]
    scratch = [pltpu.VMEM((2, heads, block, width), pairs.dtype)]
    if new_scales is not None:
        # The scales are copied to every lane, so the kernel only selects the lane of the new token.
        news.append(jnp.broadcast_to(new_scales.transpose(2, 0, 1)[..., None], (slots, kv_heads, 2, LANES)))
        new_specs.append(pl.BlockSpec((1, heads, 2, LANES), at_slot))
        pool_specs.append(pl.BlockSpec((1, heads, 2, LANES), partial(at_new, lanes=True)))
        scratch.append(pltpu.VMEM((2, heads, 2, block), jnp.float32))
    if sinks is not None:
        news.insert(0, sinks.reshape(kv_heads, group, 1))
        new_specs.insert(0, pl.BlockSpec((heads, group, 1), lambda part, *_: (part, 0, 0)))
    first_pool, written = 6 + len(news), pools if appends else []
    attended, *grown = pl.pallas_call(
        partial(_kernel, heads=heads, page_tokens=page_tokens, pools=len(pools), written=len(written), has_sinks=sinks is not None, window=window, cap=cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(parts, count[0]),
            in_specs=[
                pl.BlockSpec(per_head, at_slot),
                *new_specs,
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(pools),
            ],
            out_specs=[pl.BlockSpec(per_head, at_slot), *pool_specs[: len(written)]],
            scratch_shapes=[
                *[pltpu.VMEM((heads, group, 1), jnp.float32)] * 2,
                pltpu.SemaphoreType.DMA((2,)),
                *scratch,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((slots, kv_heads, group, head_dim), jnp.float32),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in written),
        ],
        input_output_aliases={first_pool + index: 1 + index for index in range(len(written))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="extend",
    )(
        slot_of,
        starts,
        now.lengths,
        now.tables,
        live.any()[None].astype(jnp.int32),
        (query * head_dim**-0.5).reshape(kv_heads, group, head_dim, slots).transpose(3, 0, 1, 2).astype(dtype),
        *news,
        *pools,
    )  # fmt: skip
    # The kernel computes nothing for slots that are not live.
    attended = jnp.where(live[:, None, None, None], attended, 0.0)
    return attended.transpose(1, 2, 3, 0).reshape(query.shape).astype(query.dtype), Pairs(
        *grown
    ) if appends else cache


def _kernel(
    slot_of: Any, starts: Any, lengths: Any, tables: Any, any_live: Any, query: Any, *refs: Any, heads: int, page_tokens: int, pools: int,
    written: int, has_sinks: bool, window: int, cap: float | None,
) -> None:  # fmt: skip
    """Computes one block of one slot. `out`, `top` and `total` store the slot's running softmax. `tiles` store the rows and scales with its new token.

    `pages` are buffers with room for two blocks: the current block, and the next block, which is transferred meanwhile.
    The first of `refs` are the sinks if there are any. `written` is the number of `tiles`, 0 if no token is appended.
    """
    sinks, refs = refs[:has_sinks], refs[has_sinks:]
    (new, *new_scales), sources, refs = refs[:pools], refs[pools : 2 * pools], refs[2 * pools :]
    out, tiles, (top, total, arrived, *pages) = refs[0], refs[1 : 1 + written], refs[1 + written :]
    part, step = pl.program_id(0), pl.program_id(1)
    block = pages[0].shape[2]
    at_once = block // page_tokens

    def transfers(step: Any, do: str) -> None:
        """Starts or awaits the transfer of a step's filled pages in the window."""
        slot = slot_of[step]
        first = (step - starts[slot]) * at_once
        nearest = _first_token(lengths[slot], window) // page_tokens if window else 0
        for place in range(at_once):
            used = first + place <= lengths[slot] // page_tokens

            @pl.when(used & (first + place >= nearest) if window else used)
            def _(place: int = place) -> None:
                page, tokens = tables[slot, first + place], pl.ds(place * page_tokens, page_tokens)
                for axis, (source, target) in enumerate(zip(sources, pages, strict=True)):
                    # In `pairs`, tokens are along the rows; in `scales`, they are along the lanes.
                    there = target.at[(step % 2, *[slice(None)] * (1 + axis), tokens)]
                    whole = source.at[page, pl.ds(part * heads, heads)]
                    getattr(pltpu.make_async_copy(whole, there, arrived.at[step % 2]), do)()

    @pl.when(step == 0)
    def _first() -> None:
        transfers(step, "start")

    @pl.when(step + 1 < pl.num_programs(1))
    def _next() -> None:
        transfers(step + 1, "start")

    transfers(step, "wait")
    slot = slot_of[step]
    index, length, head_dim = step - starts[slot], lengths[slot], query.shape[-1]
    first_token = _first_token(length, window)
    queries = query[0]
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=exact)

    @pl.when(index == first_token // block)
    def _begin() -> None:
        own = new[0].astype(jnp.float32)
        own_key, own_value = own[..., :head_dim], own[..., head_dim:]
        if new_scales:
            own_key, own_value = (
                own_part * new_scales[0][0, :, row : row + 1, :1] for row, own_part in enumerate((own_key, own_value))
            )  # fmt: skip
        top[...] = capped((queries.astype(jnp.float32) * own_key).sum(-1, keepdims=True), cap)
        total[...] = jnp.ones_like(total)
        out[0] = jnp.broadcast_to(own_value, out.shape[1:])

    there = pages[0][step % 2].astype(queries.dtype)
    scores = product("hgd,hcd->hgc", queries, there[..., :head_dim])
    if new_scales:
        scores = scores * pages[1][step % 2, :, :1]

    def seen(shape: tuple[int, ...], axis: int) -> Array:
        """Returns which of the block's tokens along `axis` are cached tokens in the window."""
        token = index * block + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (token < length) & (token >= first_token) if window else token < length

    attended = seen(scores.shape, 2)
    scores = jnp.where(attended, capped(scores, cap), MASKED)
    peak = jnp.maximum(top[...], scores.max(-1, keepdims=True))
    weights, shrink = jnp.exp(scores - peak), jnp.exp(top[...] - peak)
    top[...] = peak
    total[...] = total[...] * shrink + weights.sum(-1, keepdims=True)
    if new_scales:
        weights = jnp.where(attended, weights * pages[1][step % 2, :, 1:], 0.0)
    values = there[..., head_dim:]
    # Rows after the slot's tokens, and pages that were not read, may contain NaN. They are set to 0, because 0 x NaN is NaN.
    values = jnp.where(seen(values.shape, 1), values, jnp.zeros_like(values))
    out[0] = out[0] * shrink + product("hgc,hcd->hgd", weights.astype(values.dtype), values)

    @pl.when(index == length // block)
    def _end() -> None:
        # If the sink is far above all scores, the exponential is infinite, and the output 0.
        out[0] = out[0] / sum((jnp.exp(sink[...] - top[...]) for sink in sinks), total[...])
        offset = length - index * block
        for axis, (tile, own) in enumerate(zip(tiles, (new, *new_scales), strict=False)):
            size = tile.shape[2 + axis]
            begin = pl.multiple_of(offset // size * size, size)
            beside = pages[axis][(step % 2, *[slice(None)] * (1 + axis), pl.ds(begin, size))]
            place = lax.broadcasted_iota(jnp.int32, beside.shape, 1 + axis)
            # One step runs even if no slot is live; that step must not change the cache.
            tile[0] = jnp.where((place == offset - begin) & (any_live[0] > 0), own[0], beside)
