"""The cache of the decoding slots on TPU: one kernel appends a token to every live slot and attends, as `cache.extend` does.

A key and its value lie side by side, [slots, kv_heads, rows, 2 head_dim]: both come in one transfer, and heads of 64 fill the 128
lanes of a register. The kernel (Pallas) walks over a list of the blocks that live slots have filled, so that a step reads what
is there and not the capacity, and writes one tile of rows per slot in place: XLA's own updates are loops over the slots.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.models.attention import MASKED
from dapo_jax.parallel.mesh import BATCH_AXES
from dapo_jax.sampling.cache import DENSE, Cache, front_of_slot

_TILE = 16
"""Rows that are written together: as many as a bfloat16 register has."""

_ROWS = 512
"""A longer slot has a multiple of this many rows, so that blocks of them fit it."""

_BLOCK_BYTES = 1 << 20
"""Read at a time: much beside what a step of the kernel costs, little beside a core's fast memory."""


def cache_for(mesh: Mesh, *, paired: bool | None = None) -> Cache:
    """This cache on a TPU's mesh, else the dense one; `paired` takes the choice away. Elsewhere the kernel is interpreted, slowly."""
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    if not (on_tpu if paired is None else paired):
        return DENSE
    heads, slots = PartitionSpec("tensor", None, BATCH_AXES), PartitionSpec(BATCH_AXES)
    layer = PartitionSpec(BATCH_AXES, "tensor")
    # XLA cannot divide a kernel: each device is given its slots and its heads.
    spread = jax.shard_map(
        partial(extend, interpret=not on_tpu),
        mesh=mesh,
        in_specs=(layer, heads, heads, heads, slots, slots),
        out_specs=(heads, layer),
        check_vma=False,
    )
    return Cache(empty=empty, of_rows=of_rows, fill=fill, extend=spread)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """One layer's keys and values."""

    pairs: Float[Array, "slots kv_heads rows pair"] | Any
    """The key, then the value, of each token. Rows behind a slot's tokens are finite."""


def empty(slots: int, kv_heads: int, capacity: int, head_dim: int, dtype: str) -> Pairs:
    """A cache in which nothing is written yet, with `capacity` rows rounded up to whole blocks."""
    whole = _ROWS if capacity > _ROWS else _TILE
    return Pairs(jnp.zeros((slots, kv_heads, pl.cdiv(capacity, whole) * whole, 2 * head_dim), dtype))


def of_rows(
    keys: Float[Array, "kv_heads head_dim tokens"],
    values: Float[Array, "kv_heads head_dim tokens"],
    rows: int,
) -> Pairs:
    """The keys and values of rows of tokens that were read end to end."""
    pairs = jnp.concatenate([keys, values], axis=1)
    return Pairs(pairs.reshape(*pairs.shape[:2], rows, -1).transpose(2, 0, 3, 1))


def fill(
    cache: Pairs, read: Pairs, slot: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""]
) -> Pairs:
    """Does what `cache.fill` does: the prompt that begins at `start` of row `row` comes to the front of slot `slot`."""
    return Pairs(front_of_slot(cache.pairs, read.pairs, slot, row, start, axis=2))


def extend(
    cache: Pairs,
    query: Float[Array, "heads head_dim slots"],
    key: Float[Array, "kv_heads head_dim slots"],
    value: Float[Array, "kv_heads head_dim slots"],
    lengths: Int[Array, " slots"],
    live: Bool[Array, " slots"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "heads head_dim slots"], Pairs]:
    """Does what `cache.extend` does, but that nothing is written to a slot that is not live.

    The new token is not looked for in the cache: the running softmax begins with it, so it never is empty. Products are in the
    cache's dtype with sums in float32.
    """
    pairs, kv_heads = cache.pairs, len(key)
    slots, _, rows, width = pairs.shape
    # One half of the heads for each core where a chip has two; elsewhere the halves come one after the other.
    parts = 2 - kv_heads % 2
    heads = kv_heads // parts
    group, head_dim = len(query) // kv_heads, query.shape[1]
    block = _block(rows, heads * width * pairs.dtype.itemsize)
    lengths = jnp.where(live, lengths, 0)
    count, slot_of, starts = _walk(lengths // block + 1, live, slots * rows // block)

    def at_slot(part: Any, step: Any, slot_of: Any, *_: Any) -> tuple[Any, ...]:
        return slot_of[step], part, 0, 0

    def at_block(part: Any, step: Any, slot_of: Any, starts: Any, _: Any) -> tuple[Any, ...]:
        return slot_of[step], part, step - starts[slot_of[step]], 0

    def at_tile(part: Any, step: Any, slot_of: Any, _: Any, lengths: Any) -> tuple[Any, ...]:
        return slot_of[step], part, lengths[slot_of[step]] // _TILE, 0

    per_head = (1, heads, group, head_dim)
    attended, grown = pl.pallas_call(
        partial(_kernel, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(parts, count),
            in_specs=[
                pl.BlockSpec(per_head, at_slot),
                pl.BlockSpec((1, heads, 1, width), at_slot),
                pl.BlockSpec((1, heads, block, width), at_block),
            ],
            out_specs=[pl.BlockSpec(per_head, at_slot), pl.BlockSpec((1, heads, _TILE, width), at_tile)],
            scratch_shapes=[pltpu.VMEM((heads, group, 1), jnp.float32)] * 2,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((slots, kv_heads, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(pairs.shape, pairs.dtype),
        ],
        input_output_aliases={5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="extend",
    )(
        slot_of,
        starts,
        lengths,
        (query * head_dim**-0.5).reshape(kv_heads, group, head_dim, slots).transpose(3, 0, 1, 2).astype(pairs.dtype),
        jnp.concatenate([key, value], axis=1).transpose(2, 0, 1)[:, :, None].astype(pairs.dtype),
        pairs,
    )  # fmt: skip
    # Nothing was computed for the others.
    attended = jnp.where(live[:, None, None, None], attended, 0.0)
    return attended.transpose(1, 2, 3, 0).reshape(query.shape).astype(query.dtype), Pairs(grown)


def _block(rows: int, row_bytes: int) -> int:
    """The longest block of at most `_BLOCK_BYTES` that fits into the rows."""
    if rows % _ROWS:
        return rows
    fitting = (size for size in range(_ROWS, rows + 1, _ROWS) if rows % size == 0)
    return max([size for size in fitting if size * row_bytes <= _BLOCK_BYTES], default=_ROWS)


def _walk(
    blocks: Int[Array, " slots"], live: Bool[Array, " slots"], most: int
) -> tuple[Int[Array, ""], Int[Array, " most"], Int[Array, " slots"]]:
    """How many steps there are, the slot of each step, and each slot's first step. There is always one."""
    blocks = jnp.where(live, blocks, 0)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    passed = jnp.arange(most, dtype=jnp.int32)[:, None] >= ends[None]
    slot_of = jnp.minimum(passed.sum(-1, dtype=jnp.int32), len(blocks) - 1)
    return jnp.maximum(ends[-1], 1), slot_of, ends - blocks


def _kernel(
    slot_of: Any, starts: Any, lengths: Any, query: Any, new: Any, pairs: Any, out: Any, tile: Any, top: Any, total: Any,
    *, block: int,
) -> None:  # fmt: skip
    """One block of one slot: `out`, `top` and `total` are its running softmax, `tile` the rows in which the new token lies."""
    step = pl.program_id(1)
    slot = slot_of[step]
    index, length, head_dim = step - starts[slot], lengths[slot], query.shape[-1]
    queries = query[0]
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=exact)

    @pl.when(index == 0)
    def _begin() -> None:
        own = new[0].astype(jnp.float32)
        top[...] = (queries.astype(jnp.float32) * own[..., :head_dim]).sum(-1, keepdims=True)
        total[...] = jnp.ones_like(total)
        out[0] = jnp.broadcast_to(own[..., head_dim:], out.shape[1:])

    scores = product("hgd,hcd->hgc", queries, pairs[0, :, :, :head_dim])
    position = index * block + lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    scores = jnp.where(position < length, scores, MASKED)
    peak = jnp.maximum(top[...], scores.max(-1, keepdims=True))
    weights, shrink = jnp.exp(scores - peak), jnp.exp(top[...] - peak)
    top[...] = peak
    total[...] = total[...] * shrink + weights.sum(-1, keepdims=True)
    values = pairs[0, :, :, head_dim:]
    out[0] = out[0] * shrink + product("hgc,hcd->hgd", weights.astype(values.dtype), values)

    @pl.when(index == length // block)
    def _end() -> None:
        out[0] = out[0] / total[...]
        begin = pl.multiple_of(length // _TILE * _TILE - index * block, _TILE)
        there = pairs[0, :, pl.ds(begin, _TILE), :]
        row = lax.broadcasted_iota(jnp.int32, there.shape, 1)
        tile[0] = jnp.where(row == length % _TILE, new[0], there)
