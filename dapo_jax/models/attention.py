"""Attention over whole sequences (training, prefill) and over a cache (decoding).

Scores and the softmax are in float32, whatever the dtype of the inputs. Several query heads may share one key head (grouped-query attention).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.numerics.precision import capped, product, rounded

MASKED = -1e30
"""Score of a masked position. It is finite, so that a fully masked row does not become NaN."""

Near = tuple[Int[Array, ""], Int[Array, "batch seq"]]
"""A layer's window and the position of each token in its sequence. A query at position i attends to positions j with i - window < j <= i, or to all if the window is 0.
Columns of a row cannot replace positions, because several responses may share a prompt in a row."""

Blocks = Float[Array, "_ batch kv_heads ... size head_dim"]

Sinks = Float[Array, " heads"] | None
"""A number for each query head, which takes part in the softmax like the score of a further key, whose value is 0 (gpt-oss). None: there are no such numbers."""

QUERY_BLOCKS, SMALLEST_BLOCK = 4, 64
"""Number of blocks into which the queries of a row are split, and the minimum size of a block."""

MOST_BLOCKS = 128
"""Maximum number of blocks in a row with `by_blocks`."""

LONG_ROW, LONG_ROW_BLOCK = 4096, 1024
"""Rows longer than `LONG_ROW` are split into blocks of `LONG_ROW_BLOCK` queries, whose scores are recomputed in the backward pass."""


def causal_attention(
    query: Float[Array, "heads head_dim tokens"],
    key: Float[Array, "kv_heads head_dim tokens"],
    value: Float[Array, "kv_heads head_dim tokens"],
    segment_ids: Int[Array, "batch seq"],
    prefix_ids: Int[Array, "batch seq"] | None = None,
    **how: Any,
) -> Float[Array, "heads head_dim tokens"]:
    """Computes causal attention within segments. The `tokens` dimension is the concatenation of all rows of `segment_ids`.

    Each token attends to earlier tokens of its own segment and to itself. It also attends to earlier tokens of the segment given by
    `prefix_ids`. If several responses share a prompt, this is the prompt's segment. Other segments are masked. Padding (segment 0) attends only to padding.
    `how` contains keyword arguments of `row_attention`.
    """
    q, k, v = (part.reshape(*part.shape[:2], *segment_ids.shape) for part in (query, key, value))
    prefix_ids = segment_ids if prefix_ids is None else prefix_ids
    return row_attention(q, k, v, segment_ids, prefix_ids, segment_ids, **how).reshape(query.shape)


def before_keys(
    shape: tuple[int, ...], sinks: Array | None, *, least: float = MASKED, dtype: Any = jnp.float32
) -> tuple[Array, Array]:
    """Returns the largest score and the sum of weights of a running softmax before its first key. `sinks` can be broadcast to `shape`."""
    top = jnp.full(shape, least, dtype) if sinks is None else jnp.broadcast_to(sinks, shape)
    return top, jnp.full(shape, 0.0 if sinks is None else 1.0, dtype)


class _Rows(NamedTuple):
    """The properties of tokens on which the mask depends. See `row_attention`."""

    own_ids: Int[Array, "batch part"]
    prefix_ids: Int[Array, "batch part"]
    segment_ids: Int[Array, "batch seq"]
    first: Int[Array, ""] | None
    near: Near | None

    def mask(self, start: Any, size: int, end: int) -> Bool[Array, "batch size end"]:
        """Returns which of the keys before column `end` the `size` queries from query `start` on attend to."""
        own, prefix = (lax.dynamic_slice_in_dim(ids, start, size, axis=1) for ids in self[:2])
        before = self.segment_ids[:, :end]
        seen = (own[:, :, None] == before[:, None]) | (prefix[:, :, None] == before[:, None])
        column = start + jnp.arange(size, dtype=jnp.int32) + (0 if self.first is None else self.first)
        causal = column[:, None] >= jnp.arange(end, dtype=jnp.int32)[None]
        if self.near is not None:
            window, position = self.near
            own_position = lax.dynamic_slice_in_dim(position, column[0], size, axis=1)
            seen &= (window == 0) | (own_position[:, :, None] - position[:, None, :end] < window)
        return causal[None] & seen


def row_attention(
    query: Float[Array, "heads head_dim batch part"],
    key: Float[Array, "kv_heads head_dim batch seq"],
    value: Float[Array, "kv_heads head_dim batch seq"],
    own_ids: Int[Array, "batch part"],
    prefix_ids: Int[Array, "batch part"],
    segment_ids: Int[Array, "batch seq"],
    *,
    first: Int[Array, ""] | None = None,
    near: Near | None = None,
    cap: float | None = None,
    dtype: str = "float32",
    by_blocks: bool = False,
    sinks: Sinks = None,
) -> Float[Array, "heads head_dim batch part"]:
    """Computes `causal_attention` for consecutive queries of each row, from column `first` on. Without `first`, these are all queries of the row.

    Queries are processed in blocks. For a whole row, each block uses only the keys up to the end of the block, so nearly half
    of the scores are never computed. With `by_blocks`, pairs of a block of queries and a block of keys that are masked are skipped, scores are not stored
    for the backward pass, and the result at padding is 0. This is faster on a CPU.
    `near` limits the distance, and `cap` caps the scores (see `dapo_jax.numerics.precision.capped`).
    """
    (kv_heads, head_dim, _, seq), part = key.shape, query.shape[-1]
    grouped = (query * head_dim**-0.5).reshape(kv_heads, -1, *query.shape[1:])
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, -1, 1).astype(np.promote_types(dtype, np.float32))
    rows = _Rows(own_ids, prefix_ids, segment_ids, first, near)
    if by_blocks and seq > SMALLEST_BLOCK:
        size = max(SMALLEST_BLOCK, -(-seq // MOST_BLOCKS))

        def padded(x: Array, more: int = 0) -> Array:
            return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size + more)])

        def cut(x: Array) -> Blocks:
            wide = padded(x.astype(np.promote_types(dtype, np.float32)))
            return jnp.moveaxis(wide.reshape(*x.shape[:-1], -1, size), (-2, -3, -4), (0, 1, -1))

        # The last queries may be padding that begins after the last key.
        near = None if near is None else (near[0], padded(near[1], size))
        rows = _Rows(padded(own_ids), padded(prefix_ids), padded(segment_ids), first, near)
        out = _by_blocks(cap, dtype, *map(cut, (grouped, key, value)), rows, sinks)
        return jnp.moveaxis(out, (0, 1, -1), (-2, -3, -4)).reshape(*query.shape[:-1], -1)[..., :part]
    size = LONG_ROW_BLOCK if seq > LONG_ROW else max(-(-part // QUERY_BLOCKS), SMALLEST_BLOCK)
    attend = jax.checkpoint(_attend, static_argnums=(4, 5)) if seq > LONG_ROW else _attend
    out = []
    for start in range(0, part, size):
        stop = min(start + size, part)
        end = stop if first is None else seq
        mask, block = rows.mask(start, stop - start, end), grouped[..., start:stop]
        out.append(attend(key[..., :end], value[..., :end], block, mask, dtype, cap, sinks))
    return jnp.concatenate(out, axis=-1).reshape(query.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_blocks(
    cap: float | None, dtype: str, q: Blocks, k: Blocks, v: Blocks, rows: _Rows, sinks: Array | None
) -> Blocks:
    return _by_blocks_forward(cap, dtype, q, k, v, rows, sinks)[0]


def _pairs(
    cap: float | None, k: Blocks, v: Blocks, rows: _Rows, block: Array
) -> tuple[Array, Callable[[Array], Any]]:
    """Returns the number of blocks of keys that block `block` of the queries attends to, and a function that returns one of them: its index, the function
    that computes scores, its keys and its values. If a row has fewer such blocks than another row, all keys of its other blocks are masked."""
    count, batch, _, size, _ = k.shape
    mask = rows.mask(block * size, size, count * size) & (rows.segment_ids > 0)[:, None]
    mask = jnp.moveaxis(mask.reshape(batch, size, count, size), 2, 0)
    seen = mask.any((2, 3))
    order = jnp.argsort(~seen, axis=0, stable=True)

    def pair(index: Array) -> Any:
        at = order[index], jnp.arange(batch, dtype=jnp.int32)
        there = mask[at][:, None, None]

        def scores(q: Array, k: Array) -> Array:
            return jnp.where(there, capped(jnp.einsum("bkgsd,bktd->bkgst", q, k), cap), MASKED)

        return at, scores, k[at], v[at]

    return seen.sum(0, dtype=jnp.int32).max(), pair


def _by_blocks_forward(
    cap: float | None, dtype: str, q: Blocks, k: Blocks, v: Blocks, rows: _Rows, sinks: Array | None
) -> tuple[Blocks, Any]:
    k, v = rounded(k, dtype), rounded(v, dtype)

    def attend(given: tuple[Array, Array]) -> tuple[Array, Array]:
        block, q = given
        count, pair = _pairs(cap, k, v, rows, block)

        def add(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            (top, total, out), (_, scores, some_k, some_v) = carry, pair(index)
            found = scores(q, some_k)
            new_top = jnp.maximum(top, found.max(-1))
            weights, shrink = jnp.exp(found - new_top[..., None]), jnp.exp(top - new_top)
            some = jnp.einsum("bkgst,bktd->bkgsd", weights, some_v)
            return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + some

        # Masked scores are far below the first `top`, so their weights are 0, even if all scores of a query are masked.
        start = before_keys(q.shape[:-1], sinks, least=MASKED / 2, dtype=k.dtype)
        top, total, out = lax.fori_loop(0, count, add, (*start, jnp.zeros(q.shape, k.dtype)))
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        return out / total[..., None], top + jnp.log(total)

    out, logs = lax.map(attend, (jnp.arange(len(q), dtype=jnp.int32), q))
    return out, (q, k, v, rows, sinks, out, logs)


def _by_blocks_backward(cap: float | None, dtype: str, saved: Any, d_out: Blocks) -> tuple[Any, ...]:
    q, k, v, rows, sinks, out, logs = saved

    def attend(grads: tuple[Array, ...], given: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        block, q, logs, d_out, inner = given
        count, pair = _pairs(cap, k, v, rows, block)

        def add(index: Array, grads: tuple[Array, ...]) -> tuple[Array, ...]:
            (d_q, *d_kv), (at, scores, some_k, some_v) = grads, pair(index)
            weights, back = jax.vjp(lambda q, k: jnp.exp(scores(q, k) - logs[..., None]), q, some_k)
            more_q, more_k = back(jnp.einsum("bkgsd,bktd->bkgst", d_out, some_v) - inner[..., None])
            more = more_k, jnp.einsum("bkgst,bkgsd->bktd", weights, d_out)
            added = (d.at[at].add(one, unique_indices=True) for d, one in zip(d_kv, more, strict=True))
            return d_q + more_q, *added

        d_q, d_k, d_v = lax.fori_loop(0, count, add, (jnp.zeros_like(q), *grads))
        return (d_k, d_v), d_q

    inner = (d_out * out).sum(-1)
    blocks = jnp.arange(len(q), dtype=jnp.int32), q, logs, d_out, inner
    (d_k, d_v), d_q = lax.scan(attend, (jnp.zeros_like(k), jnp.zeros_like(v)), blocks)
    if sinks is None:
        return d_q, d_k, d_v, None, None
    shares = jnp.exp(sinks[None, None] - logs)
    return d_q, d_k, d_v, None, -(shares * inner).sum((0, 1, 4))[..., None]


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)


def _attend(
    k: Float[Array, "kv_heads head_dim batch seq"],
    v: Float[Array, "kv_heads head_dim batch seq"],
    grouped: Float[Array, "kv_heads group head_dim batch block"],
    mask: Bool[Array, "batch block seq"],
    dtype: str,
    cap: float | None,
    sinks: Float[Array, "kv_heads group 1"] | None,
) -> Float[Array, "kv_heads group head_dim batch block"]:
    scores = capped(product("kdbt,kgdbs->bkgst", k, grouped, dtype), cap)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    # Attention weights are rounded before they are divided by their sum, so that results match decoding.
    top = scores.max(-1, keepdims=True)
    top = lax.stop_gradient(top if sinks is None else jnp.maximum(top, sinks[None, ..., None]))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    if sinks is not None:
        total = total + jnp.exp(sinks[None] - top[..., 0])
    total = total.transpose(1, 2, 0, 3)[:, :, None]
    return product("kdbt,bkgst->kgdbs", v, weights, dtype) / total


def part_attention(
    query: Float[Array, "heads head_dim part"],
    keys: Float[Array, "kv_heads head_dim room"],
    values: Float[Array, "kv_heads head_dim room"],
    start: Int[Array, ""],
    *,
    window: Int[Array, ""] | None = None,
    cap: float | None = None,
    dtype: str = "float32",
    sinks: Sinks = None,
) -> Float[Array, "heads head_dim part"]:
    """Computes causal attention for one chunk of a sequence in chunked prefill. The chunk has `part` tokens, from token `start` on.

    Keys are processed in chunks of `part` tokens, up to and including the chunk of the queries. `room` is a multiple of `part`.
    With a `window` above 0 (see `Near`), the chunks before it are skipped.
    """
    _, head_dim, part = query.shape
    grouped = (query * head_dim**-0.5).reshape(len(keys), -1, head_dim, part)
    column = jnp.arange(part, dtype=jnp.int32)

    def attend(index: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        begin = index * part
        some_keys, some_values = (
            lax.dynamic_slice_in_dim(whole, begin, part, axis=2) for whole in (keys, values)
        )
        scores = capped(product("kdt,kgds->kgst", some_keys, grouped, dtype), cap)
        mask = begin + column[None] <= start + column[:, None]
        if window is not None:
            mask &= (window == 0) | (start + column[:, None] - begin - column[None] < window)
        scores = jnp.where(mask, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        some = product("kdt,kgst->kgds", some_values, weights, dtype)
        return new_top, total * shrink + weights.sum(-1), out * shrink[:, :, None] + some

    shape = grouped.shape
    rows = (*shape[:2], part)
    # Every query attends to its own key, so no row stays fully masked. What masked keys add before is multiplied by 0.
    begin = None if sinks is None else sinks.reshape(*shape[:2], 1)
    carry = (*before_keys(rows, begin), jnp.zeros(shape))
    first = 0
    if window is not None:
        first = jnp.where(window > 0, jnp.maximum(start - window + 1, 0) // part, 0)
    _, total, out = lax.fori_loop(first, start // part + 1, attend, carry)
    return (out / total[:, :, None]).reshape(query.shape).astype(query.dtype)


def cached_attention(
    query: Float[Array, "heads head_dim slots"],
    keys: Float[Array, "slots kv_heads head_dim capacity"],
    values: Float[Array, "slots kv_heads capacity value_dim"] | None,
    lengths: Int[Array, " slots"],
    *,
    chunk: int = 256,
    window: int = 0,
    cap: float | None = None,
    sinks: Sinks = None,
    value_dim: int | None = None,
) -> Float[Array, "heads value_dim slots"]:
    """Computes attention for one query per slot over the first `lengths` entries of the slot's KV cache, or over the last `window` of them if it is above 0.
    Without `values`, values are the first `value_dim` entries of keys.

    The loop runs over as many chunks as the longest slot needs. Chunks beyond the length of a shorter slot add exact zeros, so
    the result of a slot does not depend on the lengths of other slots.
    """
    heads, head_dim, slots = query.shape
    kv_heads, capacity = keys.shape[1], keys.shape[3]
    chunk = min(chunk, capacity)
    dtype = keys.dtype.name
    scaled = query * head_dim**-0.5
    grouped = scaled.reshape(kv_heads, heads // kv_heads, head_dim, slots).transpose(3, 0, 1, 2)

    def attend(start: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # The last chunk is moved back so that it ends at the capacity. Positions that it repeats are masked.
        begin = jnp.minimum(start, capacity - chunk)
        top, total, out = carry
        part_keys = lax.dynamic_slice_in_dim(keys, begin, chunk, axis=3)
        if values is None:
            part_values = part_keys[:, :, :value_dim].swapaxes(2, 3)
        else:
            part_values = lax.dynamic_slice_in_dim(values, begin, chunk, axis=2)
        scores = capped(product("skdc,skgd->skgc", part_keys, grouped, dtype), cap)
        position = begin + jnp.arange(chunk, dtype=jnp.int32)
        live = (position[None] < lengths[:, None]) & (position >= start)[None]
        if window:
            live &= position[None] >= lengths[:, None] - window
        scores = jnp.where(live[:, None, None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(live[:, None, None], jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        part = product("skcd,skgc->skgd", part_values, weights, dtype)
        return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + part

    shape = (slots, kv_heads, heads // kv_heads)
    begin = None if sinks is None else sinks.reshape(shape[1:])
    carry = (*before_keys(shape, begin), jnp.zeros((*shape, value_dim or head_dim)))
    if chunk == capacity:
        _, total, out = attend(jnp.zeros((), jnp.int32), carry)
    else:
        chunks, first = (lengths.max() + chunk - 1) // chunk, 0
        if window:
            first = jnp.maximum(jnp.where(lengths > 0, lengths, capacity).min() - window, 0) // chunk
        _, total, out = lax.fori_loop(first, chunks, lambda i, c: attend(i * chunk, c), carry)
    # A free slot has length 0 and total 0, so its output is 0. The output is not used.
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return out.transpose(1, 2, 3, 0).reshape(heads, -1, slots).astype(query.dtype)
